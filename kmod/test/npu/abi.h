/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The part of tt-kmd's user ABI that has to do with windows, as tt-kmd 2.10 has it: numbers, sizes and offsets.
 * Own declarations. Shared by the stand-in driver and the programs that call it.
 */
#ifndef HAWK_TEST_NPU_ABI_H
#define HAWK_TEST_NPU_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define TT_IOCTL(number)		_IO(0xFA, number)
#define TT_GET_DEVICE_INFO		TT_IOCTL(0)
#define TT_GET_DRIVER_INFO		TT_IOCTL(5)
#define TT_RESET_DEVICE			TT_IOCTL(6)
#define TT_ALLOCATE_TLB			TT_IOCTL(11)
#define TT_FREE_TLB			TT_IOCTL(12)
#define TT_CONFIGURE_TLB		TT_IOCTL(13)
#define TT_EXPORT_TLB_DMABUF		TT_IOCTL(16)

#define TT_ABI_VERSION			2

/* mmap offsets: a kind in bits 36 and up, below it a place in the BAR (a window's own for the last two kinds). */
#define TT_MMAP_KIND_SHIFT		36
#define TT_MMAP_BAR0_UC			0
#define TT_MMAP_BAR0_WC			1
#define TT_MMAP_BAR4_UC			4
#define TT_MMAP_BAR4_WC			5
#define TT_MMAP_TLB_UC			6
#define TT_MMAP_TLB_WC			7
/* Not tt-kmd's: a mapping that the driver makes of memory outside its function's BARs. */
#define NPU_MMAP_OUTSIDE		9

/* For GET_DEVICE_INFO and GET_DRIVER_INFO: so many bytes of what is there are copied out. */
struct tt_output_size {
	__u32 output_size_bytes;
};

struct tt_device_info {
	__u32 output_size_bytes;
	__u16 vendor_id;
	__u16 device_id;
	__u16 subsystem_vendor_id;
	__u16 subsystem_id;
	__u16 bus_dev_fn;
	__u16 max_dma_buf_size_log2;
	__u16 pci_domain;
	__u16 reserved;
};

struct tt_get_device_info {
	struct tt_output_size in;
	struct tt_device_info out;
};

struct tt_driver_info {
	__u32 output_size_bytes;
	__u32 driver_version;
	__u8 major;
	__u8 minor;
	__u8 patch;
	__u8 reserved;
};

struct tt_get_driver_info {
	struct tt_output_size in;
	struct tt_driver_info out;
};

struct tt_reset_device {
	struct {
		__u32 output_size_bytes;
		__u32 flags;
	} in;
	struct {
		__u32 output_size_bytes;
		__u32 result;
	} out;
};

struct tt_allocate_tlb {
	struct {
		__u64 size;
		__u64 reserved;
	} in;
	struct {
		__u32 id;
		__u32 reserved0;
		__u64 mmap_offset_uc;
		__u64 mmap_offset_wc;
		__u64 reserved1;
	} out;
};

struct tt_free_tlb {
	__u32 id;
};

struct tt_noc_target {
	__u64 addr;
	__u16 x_end;
	__u16 y_end;
	__u16 x_start;
	__u16 y_start;
	__u8 noc;
	__u8 mcast;
	__u8 ordering;
	__u8 linked;
	__u8 static_vc;
	__u8 reserved0[3];
	__u32 reserved1[2];
};

struct tt_configure_tlb {
	struct {
		__u32 id;
		__u32 reserved;
		struct tt_noc_target target;
	} in;
	struct {
		__u64 reserved;
	} out;
};

struct tt_export_tlb_dmabuf {
	__u32 argsz;
	__u32 flags;
	__u32 tlb_id;
	__s32 fd;
	__u64 offset;
	__u64 size;
};

#endif
