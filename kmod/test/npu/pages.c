// SPDX-License-Identifier: GPL-2.0-only
/*
 * struct pages for the first part of each DRAM channel.
 *
 * A real BAR has none. Software RDMA copies with the CPU, by way of struct pages, so what it is to reach needs them;
 * the rest of a channel can be mapped and registered with an HCA that has DMA addresses, but not with soft-RoCE.
 */
#include <linux/err.h>
#include <linux/memremap.h>
#include <linux/module.h>
#include <linux/numa.h>

#include "layout.h"
#include "pages.h"

static int pages_mb[NPU_CHANNELS] = { 64 };
static int pages_mb_count = 1;
module_param_array(pages_mb, int, &pages_mb_count, 0444);
MODULE_PARM_DESC(pages_mb, "MiB at the start of each channel that get struct pages; the last value holds for the rest");

static struct dev_pagemap maps[NPU_CHANNELS];

void npu_pages_remove(void)
{
	int channel;

	for (channel = NPU_CHANNELS - 1; channel >= 0; channel--) {
		if (!maps[channel].nr_range)
			continue;
		memunmap_pages(&maps[channel]);
		maps[channel].nr_range = 0;
	}
}

int npu_pages_add(phys_addr_t dram)
{
	int channel;

	for (channel = 0; channel < NPU_CHANNELS; channel++) {
		u64 size = (u64)pages_mb[min(channel, pages_mb_count - 1)] << 20;
		struct dev_pagemap *map = &maps[channel];
		void *address;

		if (!size)
			continue;
		if (size > NPU_CHANNEL_SIZE || !IS_ALIGNED(size, SZ_2M)) {
			npu_pages_remove();
			return -EINVAL;
		}
		map->type = MEMORY_DEVICE_GENERIC;
		map->range.start = dram + channel * NPU_CHANNEL_SIZE;
		map->range.end = map->range.start + size - 1;
		map->nr_range = 1;
		address = memremap_pages(map, NUMA_NO_NODE);
		if (IS_ERR(address)) {
			map->nr_range = 0;
			npu_pages_remove();
			return PTR_ERR(address);
		}
	}
	return 0;
}
