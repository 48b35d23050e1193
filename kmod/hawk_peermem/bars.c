// SPDX-License-Identifier: GPL-2.0-only
/* Which PCI function a region's page frames belong to. */
#include <linux/pci.h>

#include "region.h"

static struct resource *bar_of(struct pci_dev *pdev, phys_addr_t address)
{
	int i;

	for (i = 0; i < PCI_STD_NUM_BARS; i++) {
		struct resource *bar = &pdev->resource[i];

		if (resource_type(bar) == IORESOURCE_MEM && resource_size(bar) && address >= bar->start &&
		    address <= bar->end)
			return bar;
	}
	return NULL;
}

/* Two BARs may touch, and a run may go from one into the other. */
static bool holds_run(struct pci_dev *pdev, const struct hawk_run *run)
{
	phys_addr_t last = run->start + run->size - 1;
	phys_addr_t address = run->start;

	for (;;) {
		struct resource *bar = bar_of(pdev, address);

		if (!bar)
			return false;
		if (last <= bar->end)
			return true;
		address = bar->end + 1;
	}
}

static bool bound_to(struct pci_dev *pdev, const struct module *owner)
{
	struct pci_driver *driver = READ_ONCE(pdev->driver);

	return driver && driver->driver.owner == owner;
}

/**
 * hawk_bars_find - the function in whose BARs every run of a region lies
 * @region: was walked
 *
 * Only functions bound to the region's owner count. Returns a reference, or NULL.
 */
struct pci_dev *hawk_bars_find(const struct hawk_region *region)
{
	struct pci_dev *pdev = NULL;
	unsigned int i;

	for_each_pci_dev(pdev) {
		if (!bound_to(pdev, region->owner))
			continue;
		for (i = 0; i < region->run_count; i++)
			if (!holds_run(pdev, &region->runs[i]))
				break;
		if (i == region->run_count)
			return pdev;
	}
	return NULL;
}
