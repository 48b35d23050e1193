// SPDX-License-Identifier: GPL-2.0-only
/*
 * A stand-in for the part of MLNX_OFED's ib_core that has peer memory, for a kernel that has none, and a software HCA
 * that obeys invalidations (soft-RoCE does not). Test code: never installed.
 */
#include <linux/module.h>

#include "core.h"

static int __init peer_core_init(void)
{
	int ret = peer_events_init();

	if (ret)
		return ret;
	ret = peer_hca_init();
	if (ret)
		goto events;
	ret = peer_hooks_init();
	if (ret)
		goto hca;
	return 0;

hca:
	peer_hca_exit();
events:
	peer_events_exit();
	return ret;
}

static void __exit peer_core_exit(void)
{
	peer_hooks_exit();
	peer_hca_exit();
	peer_events_exit();
}

module_init(peer_core_init);
module_exit(peer_core_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Test only: a stand-in for an RDMA core with peer memory");
