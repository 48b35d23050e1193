// SPDX-License-Identifier: GPL-2.0-only
/*
 * A region's runs as addresses that a device can use.
 *
 * For an HCA: dma_map_resource(), since a BAR has no struct pages. For software RDMA, where the core has no DMA device
 * and the CPU copies by way of struct pages: the pages, if somebody has given the BAR any. This module makes none:
 * that would map device memory cached.
 */
#include <linux/dma-mapping.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/pci.h>

#include "region.h"

static int map_for_device(struct hawk_run *run, struct scatterlist *entry, struct device *device)
{
	run->dma = dma_map_resource(device, run->start, run->size, DMA_BIDIRECTIONAL, 0);
	if (dma_mapping_error(device, run->dma))
		return -EIO;
	sg_set_page(entry, NULL, run->size, 0);
	sg_dma_address(entry) = run->dma;
	sg_dma_len(entry) = run->size;
	return 0;
}

static int map_for_cpu(struct hawk_run *run, struct scatterlist *entry)
{
	struct dev_pagemap *pagemap = get_dev_pagemap(PHYS_PFN(run->start), NULL);
	struct page *page;

	if (!pagemap)
		return -EOPNOTSUPP;
	if (run->start + run->size - 1 > pagemap->range.end) {
		put_dev_pagemap(pagemap);
		return -EOPNOTSUPP;
	}
	run->pagemap = pagemap;
	page = pfn_to_page(PHYS_PFN(run->start));
	sg_set_page(entry, page, run->size, 0);
	sg_dma_address(entry) = (uintptr_t)page_address(page);
	sg_dma_len(entry) = run->size;
	return 0;
}

static void unmap_runs(struct hawk_region *region, struct device *device, unsigned int count)
{
	while (count--) {
		struct hawk_run *run = &region->runs[count];

		if (device)
			dma_unmap_resource(device, run->dma, run->size, DMA_BIDIRECTIONAL, 0);
		else
			put_dev_pagemap(run->pagemap);
		run->dma = 0;
		run->pagemap = NULL;
	}
}

/**
 * hawk_dma_map - fill a table with a region's addresses for a device
 * @region: was walked and is not mapped
 * @table: the core's
 * @device: NULL for software RDMA
 *
 * One entry a run. The table is untouched after an error: -ENOMEM; -EIO, the device cannot reach the memory;
 * -EOPNOTSUPP, software RDMA and the memory has no struct pages.
 */
int hawk_dma_map(struct hawk_region *region, struct sg_table *table, struct device *device)
{
	struct sg_table new = {};
	struct scatterlist *entry;
	unsigned int i;
	int ret;

	ret = sg_alloc_table(&new, region->run_count, GFP_KERNEL);
	if (ret)
		return ret;
	for_each_sg(new.sgl, entry, region->run_count, i) {
		struct hawk_run *run = &region->runs[i];

		ret = device ? map_for_device(run, entry, device) : map_for_cpu(run, entry);
		if (ret) {
			unmap_runs(region, device, i);
			sg_free_table(&new);
			return ret;
		}
	}
	region->device = device;
	region->table = new;
	*table = new;
	return 0;
}

/* Undoes hawk_dma_map(), except for the table. */
void hawk_dma_unmap(struct hawk_region *region)
{
	unmap_runs(region, region->device, region->run_count);
	region->device = NULL;
}
