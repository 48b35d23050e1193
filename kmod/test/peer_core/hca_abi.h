/* SPDX-License-Identifier: GPL-2.0-only */
/* /dev/hawk_soft_hca: one registration an open file. */
#ifndef HAWK_TEST_HCA_ABI_H
#define HAWK_TEST_HCA_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* For HCA_REGISTER and HCA_IMPORT: the HCA goes on after an invalidation. For a test that must be able to fail. */
#define HCA_DEAF	1

struct hca_register {
	__u64 address;
	__u64 size;
	__u32 flags;
	__u32 reserved;
};

struct hca_import {
	__s32 fd;
	__u32 flags;
};

/* Bytes between the caller's buffer and the registration, at an offset in it that is aligned to nothing. */
struct hca_copy {
	__u64 offset;
	__u64 size;
	__u64 buffer;
	__u32 to_device;
	__u32 reserved;
};

/* Writes 8 bytes at @offset (aligned to 8), over and over, a number that grows. */
struct hca_run {
	__u64 offset;
};

struct hca_status {
	__u64 accesses;			/* by HCA_RUN's writes */
	__u64 accesses_when_stopped;	/* when the invalidation was answered */
	__u32 invalidated;
	__u32 mappings;			/* DMA mappings of the HCA that were made and not undone, of all files */
};

#define HCA_REGISTER	_IOW('H', 1, struct hca_register)
#define HCA_IMPORT	_IOW('H', 2, struct hca_import)
#define HCA_COPY	_IOW('H', 3, struct hca_copy)
#define HCA_RUN		_IOW('H', 4, struct hca_run)
#define HCA_STATUS	_IOR('H', 5, struct hca_status)

#endif
