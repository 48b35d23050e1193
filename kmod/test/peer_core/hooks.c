// SPDX-License-Identifier: GPL-2.0-only
/*
 * What a core with peer memory does inside ib_umem_get() and ib_umem_release(), done from outside on a kernel without:
 * ftrace sends calls of both here. So ibv_reg_mr() of an unchanged program on an unchanged driver reaches the clients.
 */
#include <linux/ftrace.h>
#include <linux/module.h>
#include <linux/version.h>
#include <rdma/ib_verbs.h>

#include "core.h"

/* The umems that came from a client, by address; the driver gives back what it was given. */
static DEFINE_XARRAY(taken);

static noinline struct ib_umem *hooked_get(struct ib_device *device, unsigned long address, size_t size, int access)
{
	struct ib_umem *pinned = ib_umem_get(device, address, size, access);
	struct peer_umem *umem;
	int ret;

	if (!IS_ERR(pinned))
		return pinned;
	umem = peer_umem_get(address, size, ib_access_writable(access), device->dma_device, NULL, NULL);
	if (IS_ERR(umem))
		return PTR_ERR(umem) == -EFAULT ? pinned : ERR_CAST(umem);
	umem->umem.ibdev = device;
	ret = xa_err(xa_store(&taken, (unsigned long)&umem->umem, umem, GFP_KERNEL));
	if (ret) {
		peer_umem_release(umem);
		return ERR_PTR(ret);
	}
	return &umem->umem;
}

static noinline void hooked_release(struct ib_umem *umem)
{
	struct peer_umem *peer = umem ? xa_erase(&taken, (unsigned long)umem) : NULL;

	if (peer)
		peer_umem_release(peer);
	else
		ib_umem_release(umem);
	barrier();	/* no tail call: the caller of the real function must lie in this module */
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define ftrace_regs_set_instruction_pointer	ftrace_instruction_pointer_set
#endif

/* Calls from this module, which are those above, go through. */
static void redirect(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	if (!within_module(parent, THIS_MODULE))
		ftrace_regs_set_instruction_pointer(regs, (unsigned long)ops->private);
}

#define HOOK_FLAGS	(FTRACE_OPS_FL_IPMODIFY | FTRACE_OPS_FL_RECURSION | FTRACE_OPS_FL_SAVE_REGS)

static struct ftrace_ops get_ops = { .func = redirect, .flags = HOOK_FLAGS, .private = hooked_get };
static struct ftrace_ops release_ops = { .func = redirect, .flags = HOOK_FLAGS, .private = hooked_release };

static int hook(struct ftrace_ops *ops, unsigned long function)
{
	int ret = ftrace_set_filter_ip(ops, function, 0, 0);

	return ret ?: register_ftrace_function(ops);
}

int peer_hooks_init(void)
{
	int ret = hook(&release_ops, (unsigned long)ib_umem_release);

	if (ret)
		return ret;
	ret = hook(&get_ops, (unsigned long)ib_umem_get);
	if (ret)
		unregister_ftrace_function(&release_ops);
	return ret;
}

/* No registration is left: each holds its client, and each client this module. */
void peer_hooks_exit(void)
{
	unregister_ftrace_function(&get_ops);
	unregister_ftrace_function(&release_ops);
	synchronize_rcu_tasks();
	xa_destroy(&taken);
}
