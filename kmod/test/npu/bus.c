// SPDX-License-Identifier: GPL-2.0-only
/*
 * A PCI root bus with one function, which looks like a Tenstorrent Blackhole and has plain memory for BARs.
 *
 * The configuration space is emulated here; the BARs lie in the BAR of an ivshmem-plain function (see layout.h), which
 * is a file on the host. Any driver for 1e52:b140 binds; no firmware answers it.
 */
#include <linux/module.h>
#include <linux/pci.h>

#include "layout.h"
#include "pages.h"

#define IVSHMEM_VENDOR_ID	0x1af4
#define IVSHMEM_DEVICE_ID	0x1110
#define IVSHMEM_MEMORY_BAR	2

#define CONFIG_SIZE		256
#define CLASS_ACCELERATOR	0x12

static int domain = 0x7a;
module_param(domain, int, 0444);
MODULE_PARM_DESC(domain, "PCI domain of the bus");

static u8 config[CONFIG_SIZE];
static u32 bar_mask[PCI_STD_NUM_BARS];
static struct pci_dev *memory;
static struct pci_bus *bus;
static struct pci_sysdata sysdata;
static struct resource bus_numbers = { .name = "NPU stand-in bus", .flags = IORESOURCE_BUS };
static struct resource window = { .name = "NPU stand-in memory" };

static void put16(int where, u16 value)
{
	memcpy(config + where, &value, sizeof(value));
}

static void put32(int where, u32 value)
{
	memcpy(config + where, &value, sizeof(value));
}

/* A 64-bit BAR that "firmware" has placed at @address. */
static void put_bar(int bar, u64 address, u64 size, u32 flags)
{
	bar_mask[bar] = lower_32_bits(~(size - 1));
	bar_mask[bar + 1] = upper_32_bits(~(size - 1));
	put32(PCI_BASE_ADDRESS_0 + 4 * bar, lower_32_bits(address) | flags | PCI_BASE_ADDRESS_MEM_TYPE_64);
	put32(PCI_BASE_ADDRESS_0 + 4 * (bar + 1), upper_32_bits(address));
}

static int config_read(struct pci_bus *b, unsigned int devfn, int where, int size, u32 *value)
{
	u32 word = 0;

	if (devfn) {
		*value = ~0u;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	if (where + size <= CONFIG_SIZE)
		memcpy(&word, config + where, size);
	*value = word;
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *b, unsigned int devfn, int where, int size, u32 value)
{
	int bar = (where - PCI_BASE_ADDRESS_0) / 4;

	if (devfn || where + size > CONFIG_SIZE)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where == PCI_COMMAND || where == PCI_INTERRUPT_LINE) {
		memcpy(config + where, &value, size);
	} else if (where >= PCI_BASE_ADDRESS_0 && bar < PCI_STD_NUM_BARS && size == 4) {
		u32 flags = bar % 2 ? 0 : config[where] & ~PCI_BASE_ADDRESS_MEM_MASK;

		put32(where, (value & bar_mask[bar]) | flags);
	}
	return PCIBIOS_SUCCESSFUL;	/* everything else is read-only */
}

static struct pci_ops config_ops = { .read = config_read, .write = config_write };

static void fill_config(u64 base)
{
	put16(PCI_VENDOR_ID, NPU_VENDOR_ID);
	put16(PCI_DEVICE_ID, NPU_DEVICE_ID);
	put16(PCI_SUBSYSTEM_VENDOR_ID, NPU_VENDOR_ID);
	put16(PCI_SUBSYSTEM_ID, NPU_SUBSYSTEM_ID);
	config[PCI_CLASS_DEVICE + 1] = CLASS_ACCELERATOR;
	put_bar(0, base + NPU_BAR0_OFFSET, NPU_BAR0_SIZE, 0);
	put_bar(2, base + NPU_BAR2_OFFSET, NPU_BAR2_SIZE, 0);
	put_bar(4, base + NPU_BAR4_OFFSET, NPU_BAR4_SIZE, PCI_BASE_ADDRESS_MEM_PREFETCH);
	put16(PCI_COMMAND, PCI_COMMAND_MEMORY);
}

static int make_bus(void)
{
	LIST_HEAD(resources);

	sysdata.domain = domain;
	sysdata.node = NUMA_NO_NODE;
	pci_add_resource(&resources, &bus_numbers);
	pci_add_resource(&resources, &window);
	bus = pci_create_root_bus(&memory->dev, 0, &config_ops, &sysdata, &resources);
	if (!bus) {
		pci_free_resource_list(&resources);
		return -ENOMEM;
	}
	pci_lock_rescan_remove();
	pci_scan_child_bus(bus);
	pci_bus_claim_resources(bus);
	pci_bus_add_devices(bus);
	pci_unlock_rescan_remove();
	return 0;
}

static int __init npu_bus_init(void)
{
	struct resource *bar;
	int ret;

	memory = pci_get_device(IVSHMEM_VENDOR_ID, IVSHMEM_DEVICE_ID, NULL);
	if (!memory)
		return -ENODEV;
	ret = pci_enable_device(memory);
	if (ret)
		goto put;
	bar = &memory->resource[IVSHMEM_MEMORY_BAR];
	if (resource_size(bar) < NPU_MEMORY_SIZE) {
		pci_err(memory, "the NPU stand-in needs a BAR of %llu bytes, not %pa\n",
			NPU_MEMORY_SIZE, &(resource_size_t){ resource_size(bar) });
		ret = -ENXIO;
		goto disable;
	}
	window.start = bar->start;
	window.end = bar->end;
	window.flags = IORESOURCE_MEM | IORESOURCE_MEM_64;
	window.parent = bar;
	fill_config(bar->start);
	ret = npu_pages_add(bar->start + NPU_BAR4_OFFSET);
	if (ret)
		goto disable;
	ret = make_bus();
	if (ret)
		goto pages;
	return 0;

pages:
	npu_pages_remove();
disable:
	pci_disable_device(memory);
put:
	pci_dev_put(memory);
	return ret;
}

static void __exit npu_bus_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	pci_unlock_rescan_remove();
	npu_pages_remove();
	pci_disable_device(memory);
	pci_dev_put(memory);
}

module_init(npu_bus_init);
module_exit(npu_bus_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Test only: a PCI bus with a stand-in for a Tenstorrent Blackhole, its BARs in host-visible memory");
