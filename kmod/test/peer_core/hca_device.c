// SPDX-License-Identifier: GPL-2.0-only
/*
 * The software HCA as the DMA API sees it. Its addresses are not physical ones, as behind an IOMMU, so that a client
 * that hands out physical addresses is found out; every mapping is counted, and mapping can be made to fail.
 */
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/platform_device.h>

#include "core.h"
#include "hca.h"

#define BUS_OFFSET	(1ULL << 56)

static int map_budget = -1;
module_param(map_budget, int, 0644);
MODULE_PARM_DESC(map_budget, "how many more DMA mappings the HCA can make; -1: any number");

static struct platform_device *hca;
static atomic_t mappings;
static atomic64_t mapped_bytes;

static dma_addr_t map_resource(struct device *dev, phys_addr_t address, size_t size, enum dma_data_direction direction,
			       unsigned long attrs)
{
	if (READ_ONCE(map_budget) == 0)
		return DMA_MAPPING_ERROR;
	if (READ_ONCE(map_budget) > 0)
		map_budget--;
	atomic_inc(&mappings);
	atomic64_add(size, &mapped_bytes);
	return address + BUS_OFFSET;
}

static void unmap_resource(struct device *dev, dma_addr_t address, size_t size, enum dma_data_direction direction,
			   unsigned long attrs)
{
	if (address < BUS_OFFSET)
		peer_violation("an address was unmapped that was never mapped: %pad", &address);
	atomic64_sub(size, &mapped_bytes);
	if (atomic_dec_return(&mappings) == 0 && atomic64_read(&mapped_bytes))
		peer_violation("sizes mapped and unmapped differ by %lld bytes", atomic64_read(&mapped_bytes));
}

static const struct dma_map_ops hca_dma_ops = {
	.map_resource = map_resource,
	.unmap_resource = unmap_resource,
};

struct device *hca_device(void)
{
	return &hca->dev;
}

unsigned int hca_device_mappings(void)
{
	return atomic_read(&mappings);
}

phys_addr_t hca_device_resolve(dma_addr_t address)
{
	return address - BUS_OFFSET;
}

int hca_device_init(void)
{
	hca = platform_device_register_simple("hawk_soft_hca", PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(hca))
		return PTR_ERR(hca);
	hca->dev.dma_mask = &hca->dev.coherent_dma_mask;
	hca->dev.coherent_dma_mask = DMA_BIT_MASK(64);
	set_dma_ops(&hca->dev, &hca_dma_ops);
	return 0;
}

void hca_device_exit(void)
{
	if (hca_device_mappings())
		peer_violation("%u DMA mappings are left", hca_device_mappings());
	platform_device_unregister(hca);
}
