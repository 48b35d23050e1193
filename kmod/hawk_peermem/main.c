// SPDX-License-Identifier: GPL-2.0-only
/*
 * hawk_peermem: lets RDMA register an NPU's memory windows by address.
 *
 * The driver of a Tenstorrent NPU maps windows of a PCI BAR into a process (VM_PFNMAP). get_user_pages() cannot pin
 * such a range, so ibv_reg_mr() fails on it, unless a client of the RDMA core's peer-memory interface takes it. This
 * module is that client. The driver need not know of it.
 */
#include <linux/module.h>
#include <linux/sizes.h>

#include "peermem.h"

static char *owner = "tenstorrent";
module_param(owner, charp, 0444);
MODULE_PARM_DESC(owner, "module name of the driver whose mappings are served (default tenstorrent)");

static unsigned int max_regions = 4096;
module_param(max_regions, uint, 0644);
MODULE_PARM_DESC(max_regions, "registrations at one time, in the whole system (default 4096)");

static unsigned int max_region_mb = 65536;
module_param(max_region_mb, uint, 0644);
MODULE_PARM_DESC(max_region_mb, "largest registration in MiB (default 65536)");

const char *hawk_owner(void)
{
	return owner;
}

unsigned int hawk_max_regions(void)
{
	return READ_ONCE(max_regions);
}

u64 hawk_max_region_bytes(void)
{
	return (u64)READ_ONCE(max_region_mb) * SZ_1M;
}

static int __init hawk_peermem_init(void)
{
	int ret = hawk_state_init();

	if (ret)
		return ret;
	ret = hawk_client_register();
	if (ret)
		hawk_state_exit();
	return ret;
}

static void __exit hawk_peermem_exit(void)
{
	hawk_client_unregister();
	hawk_state_exit();
}

module_init(hawk_peermem_init);
module_exit(hawk_peermem_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(HAWK_PEERMEM_VERSION);
MODULE_DESCRIPTION("Peer-memory client: RDMA into the memory windows of a Tenstorrent NPU");
