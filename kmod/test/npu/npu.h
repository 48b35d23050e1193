/* SPDX-License-Identifier: GPL-2.0-only */
/* What the files of the stand-in driver share: the chip and its windows. */
#ifndef HAWK_TEST_NPU_NPU_H
#define HAWK_TEST_NPU_NPU_H

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/pci.h>

#include "abi.h"
#include "layout.h"

#define SMALL_WINDOWS		202	/* 2 MiB each; the last one is the kernel's */
#define LARGE_WINDOWS		8	/* 4 GiB each */
#define WINDOWS			(SMALL_WINDOWS + LARGE_WINDOWS)
#define KERNEL_WINDOW		(SMALL_WINDOWS - 1)

struct npu_client;

/**
 * struct npu_window - one window
 * @owner: the open file that allocated it; NULL if it is free or only held by exports
 * @exports: dma-bufs that show it; it cannot be allocated again before they are gone
 * @mappings: VMAs that show it, forked copies included
 * @aimed: whether CONFIGURE_TLB was called since it was allocated
 * @shows: the offset in the DRAM (BAR 4) at which what it shows begins
 */
struct npu_window {
	struct npu_client *owner;
	unsigned int exports;
	unsigned int mappings;
	bool aimed;
	u64 shows;
};

/**
 * struct npu - one chip; freed with the last reference to @dev
 * @lock: guards what follows; taken under mmap_lock, and under no lock that is held around user memory
 * @gone: the function was removed or the driver unbound
 * @generation: counts resets; files opened before the last one are of no use
 * @exports_lock: guards @exports; a dma-buf's reservation is taken under it
 * @exports: all live dma-bufs
 * @inode: the page cache of this inode has all mappings of the chip, so that they can be zapped together
 */
struct npu {
	struct device dev;
	struct cdev cdev;
	struct pci_dev *pdev;
	struct mutex lock;
	bool gone;
	unsigned int generation;
	struct npu_window windows[WINDOWS];
	struct mutex exports_lock;
	struct list_head exports;
	struct inode *inode;
};

/* One open file. */
struct npu_client {
	struct npu *npu;
	unsigned int generation;
};

/* chardev.c */
int npu_chardev_init(void);
void npu_chardev_exit(void);
struct npu *npu_create(struct pci_dev *pdev);
void npu_detach(struct npu *npu);

/* windows.c */
u64 npu_window_size(unsigned int id);
long npu_allocate_tlb(struct npu_client *client, struct tt_allocate_tlb __user *arg);
long npu_free_tlb(struct npu_client *client, struct tt_free_tlb __user *arg);
long npu_configure_tlb(struct npu_client *client, struct tt_configure_tlb __user *arg);
void npu_free_windows_of(struct npu_client *client);

/* mapping.c */
int npu_mmap(struct file *file, struct vm_area_struct *vma);

/* dmabuf.c */
long npu_export_tlb_dmabuf(struct npu_client *client, struct tt_export_tlb_dmabuf __user *arg);
void npu_revoke_dmabufs(struct npu *npu);

#endif
