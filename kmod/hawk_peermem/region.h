/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef HAWK_PEERMEM_REGION_H
#define HAWK_PEERMEM_REGION_H

#include <linux/mmu_notifier.h>
#include <linux/mutex.h>
#include <linux/scatterlist.h>
#include <linux/types.h>

struct dev_pagemap;
struct device;
struct file;
struct module;
struct pci_dev;

/**
 * struct hawk_run - consecutive page frames
 * @start: physical address, page-aligned
 * @size: bytes, a multiple of the page size, at most HAWK_RUN_MAX
 * @dma: the address for the region's device, while mapped
 * @pagemap: for software RDMA, a reference to what gives the frames their struct pages, while mapped
 */
struct hawk_run {
	phys_addr_t start;
	size_t size;
	dma_addr_t dma;
	struct dev_pagemap *pagemap;
};

/* A scatterlist entry's length has 32 bits, and a window may have 4 GiB. */
#define HAWK_RUN_MAX	SZ_1G

/**
 * struct hawk_region - one registered user range
 * @notifier: tells when the range's page tables change
 * @start: user address, rounded down to a page
 * @size: bytes, rounded out to pages
 * @owner: the driver's module to which every page belongs
 * @pdev: the PCI function in whose BARs every page lies
 * @files: the driver's files behind the range, held until release, so that no window is given to anyone else
 * @file_count: length of @files
 * @runs: what the range shows, in order
 * @run_count: length of @runs
 * @run_room: allocated length of @runs
 * @writable: whether the process may write to all of it
 * @lock: guards what follows. Taken under mmap_lock and under the core's lock of the registration; neither is taken
 *        under it
 * @dead: the range changed, or the process has ended; no use is left but release
 * @has_core_context: the core may be told of an invalidation
 * @core_context: the core's name for the registration
 * @mapped: @table and the runs' addresses are in use by @device
 * @device: whose DMA addresses they are; NULL for software RDMA
 * @table: a copy of the core's table, which the core forgets on invalidation; freed on release
 */
struct hawk_region {
	struct mmu_interval_notifier notifier;
	unsigned long start;
	size_t size;
	struct module *owner;
	struct pci_dev *pdev;
	struct file **files;
	unsigned int file_count;
	struct hawk_run *runs;
	unsigned int run_count;
	unsigned int run_room;
	bool writable;

	struct mutex lock;
	bool dead;
	bool has_core_context;
	u64 core_context;
	bool mapped;
	struct device *device;
	struct sg_table table;
};

/* region.c */
struct hawk_region *hawk_region_create(unsigned long address, size_t size);
void hawk_region_destroy(struct hawk_region *region);
int hawk_region_attach(struct hawk_region *region, u64 core_context, bool write);
int hawk_region_map(struct hawk_region *region, struct sg_table *table, struct device *device);
void hawk_region_unmap(struct hawk_region *region);

/* walk.c */
bool hawk_walk_begins(unsigned long address);
int hawk_walk(struct hawk_region *region);
void hawk_walk_forget(struct hawk_region *region);

/* bars.c */
struct pci_dev *hawk_bars_find(const struct hawk_region *region);

/* dma.c */
int hawk_dma_map(struct hawk_region *region, struct sg_table *table, struct device *device);
void hawk_dma_unmap(struct hawk_region *region);

#endif
