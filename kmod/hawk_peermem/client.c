// SPDX-License-Identifier: GPL-2.0-only
/* The peer-memory client: what the RDMA core calls, and our registration with it. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/err.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "peer_mem.h"
#include "peermem.h"
#include "region.h"

/*
 * Weak, so that one module loads on kernels with and without a core. symbol_get() would be the usual way, but since 6.6
 * it refuses symbols that are not GPL-only, which these are not.
 */
void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback) __weak;
void ib_unregister_peer_memory_client(void *reg_handle) __weak;

static void *registration;
static invalidate_peer_memory invalidate_core;

static bool is_refusal(long error)
{
	return error != -ENODEV && error != -EINVAL;
}

static int client_acquire(unsigned long addr, size_t size, void *peer_mem_private_data, char *peer_mem_name,
			  void **client_context)
{
	struct hawk_region *region;

	if (!current->mm)
		return 0;
	region = hawk_region_create(addr, size);
	if (IS_ERR(region)) {
		long error = PTR_ERR(region);

		if (!is_refusal(error)) {
			atomic64_inc(&hawk_counters.not_ours);
			return 0;
		}
		atomic64_inc(&hawk_counters.refused);
		pr_info_ratelimited("%s[%d]: %zu bytes at %#lx refused: error %ld\n", current->comm, current->pid,
				    size, addr, error);
		return 0;
	}
	if (!try_module_get(THIS_MODULE)) {	/* being unloaded */
		hawk_region_destroy(region);
		return 0;
	}
	atomic64_inc(&hawk_counters.acquired);
	pr_debug("acquire %#lx+%#zx: %u runs in %s\n", region->start, region->size, region->run_count,
		 pci_name(region->pdev));
	*client_context = region;
	return 1;
}

static int client_get_pages(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			    void *client_context, u64 core_context)
{
	/* The core asks for writing always, and with force where the registration is read-only. */
	int ret = hawk_region_attach(client_context, core_context, write && !force);

	pr_debug("get_pages %#lx+%#zx: %d\n", addr, size, ret);
	return ret;
}

static int client_dma_map(struct sg_table *sg_head, void *client_context, struct device *dma_device, int dmasync,
			  int *nmap)
{
	struct hawk_region *region = client_context;
	int ret = hawk_region_map(region, sg_head, dma_device);

	if (ret) {
		atomic64_inc(&hawk_counters.map_failures);
		pr_info_ratelimited("%zu bytes at %#lx: no addresses for %s: error %d%s\n", region->size,
				    region->start, dma_device ? dev_name(dma_device) : "software RDMA", ret,
				    ret == -EOPNOTSUPP ? ", since the BAR has no struct pages" : "");
		return ret;
	}
	*nmap = region->run_count;
	pr_debug("dma_map %#lx: %u entries for %s\n", region->start, region->run_count,
		 dma_device ? dev_name(dma_device) : "software RDMA");
	return 0;
}

static int client_dma_unmap(struct sg_table *sg_head, void *client_context, struct device *dma_device)
{
	hawk_region_unmap(client_context);
	return 0;
}

/* No page has a count to drop. The table is freed with the region: after an invalidation this is not called. */
static void client_put_pages(struct sg_table *sg_head, void *client_context)
{
}

static unsigned long client_get_page_size(void *client_context)
{
	return PAGE_SIZE;
}

static void client_release(void *client_context)
{
	struct hawk_region *region = client_context;

	pr_debug("release %#lx+%#zx\n", region->start, region->size);
	hawk_region_destroy(region);
	module_put(THIS_MODULE);
}

static struct peer_memory_client_ex client = {
	.client = {
		.name = KBUILD_MODNAME,
		.version = HAWK_PEERMEM_VERSION,
		.acquire = client_acquire,
		.get_pages = client_get_pages,
		.dma_map = client_dma_map,
		.dma_unmap = client_dma_unmap,
		.put_pages = client_put_pages,
		.get_page_size = client_get_page_size,
		.release = client_release,
	},
	.ex_size = sizeof(client),
	.flags = PEER_MEM_INVALIDATE_UNMAPS,
};

/* On return no device touches the memory of the registration that the core calls @core_context. */
void hawk_client_invalidate(u64 core_context)
{
	invalidate_core(registration, core_context);
}

bool hawk_client_registered(void)
{
	return registration;
}

/* Without a core this does nothing, and says so once. -EINVAL: the core did not take us. */
int hawk_client_register(void)
{
	if (!ib_register_peer_memory_client || !ib_unregister_peer_memory_client) {
		pr_info("the RDMA core has no peer memory, so windows cannot be registered by address\n");
		pr_info("use the driver's dma-buf export (tt-kmd 2.10) with an HCA that takes one\n");
		return 0;
	}
	client.client.version[IB_PEER_MEMORY_VER_MAX - 1] = 1;	/* says that flags are there */
	registration = ib_register_peer_memory_client(&client.client, &invalidate_core);
	if (!registration) {
		pr_err("the RDMA core refused to register a peer-memory client\n");
		return -EINVAL;
	}
	return 0;
}

/* Waits for the last registration to end; there is none, or the module would be in use. */
void hawk_client_unregister(void)
{
	if (registration)
		ib_unregister_peer_memory_client(registration);
	registration = NULL;
}
