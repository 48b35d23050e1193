/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Where the stand-in's BARs lie inside the memory that the host sees, and what they hold.
 *
 * A file of 64 GiB (sparse) on the host is BAR 2 of an ivshmem-plain function. In it:
 *
 *   offset            holds
 *   0                 BAR 4, 32 GiB: the DRAM, channel by channel, 4 GiB each
 *   32 GiB            BAR 0, 512 MiB: where a chip has its 2 MiB windows and registers; nothing reads it here
 *   32 GiB + 512 MiB  BAR 2, 1 MiB
 *   33 GiB            2 MiB that lie in no BAR, for a test that they are refused
 *
 * So byte a of channel c is byte c * 4 GiB + a of the host's file. On a chip a window shows what it is aimed at. Here
 * the mapping of a window is made of the pages that it is aimed at when it is mapped; they all lie in BAR 4.
 */
#ifndef HAWK_TEST_NPU_LAYOUT_H
#define HAWK_TEST_NPU_LAYOUT_H

#include <linux/sizes.h>

#define NPU_VENDOR_ID		0x1e52
#define NPU_DEVICE_ID		0xb140
#define NPU_SUBSYSTEM_ID	0x0040

#define NPU_CHANNELS		8
#define NPU_CHANNEL_SIZE	SZ_4G
#define NPU_DRAM_SIZE		(NPU_CHANNELS * NPU_CHANNEL_SIZE)

#define NPU_BAR4_OFFSET		0ULL
#define NPU_BAR4_SIZE		NPU_DRAM_SIZE
#define NPU_BAR0_OFFSET		NPU_DRAM_SIZE
#define NPU_BAR0_SIZE		SZ_512M
#define NPU_BAR2_OFFSET		(NPU_DRAM_SIZE + SZ_512M)
#define NPU_BAR2_SIZE		SZ_1M

/* Behind the BARs: memory that belongs to no function's BAR but ivshmem's. */
#define NPU_OUTSIDE_OFFSET	(NPU_BAR0_OFFSET + SZ_1G)
#define NPU_OUTSIDE_SIZE	SZ_2M

#define NPU_MEMORY_SIZE		(2 * NPU_DRAM_SIZE)

#endif
