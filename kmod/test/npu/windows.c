// SPDX-License-Identifier: GPL-2.0-only
/* The chip's windows: allocated to a file, aimed at a DRAM channel, freed. */
#include <linux/uaccess.h>

#include "npu.h"

/*
 * Blackhole's translated NoC coordinates of the DRAM: four channels in each of two columns, three tiles (ports) a
 * channel, all of which reach the same memory.
 */
#define DRAM_FIRST_X		17
#define DRAM_FIRST_Y		12
#define CHANNELS_PER_COLUMN	4
#define PORTS_PER_CHANNEL	3

u64 npu_window_size(unsigned int id)
{
	return id < SMALL_WINDOWS ? SZ_2M : SZ_4G;
}

static u64 mmap_offset(unsigned int id, u64 kind)
{
	u64 place = id < SMALL_WINDOWS ? id * (u64)SZ_2M : NPU_BAR0_SIZE + (id - SMALL_WINDOWS) * (u64)SZ_4G;

	return (kind << TT_MMAP_KIND_SHIFT) + place;
}

static int claim(struct npu_client *client, u64 size)
{
	unsigned int id = size == SZ_2M ? 0 : SMALL_WINDOWS;
	unsigned int end = size == SZ_2M ? KERNEL_WINDOW : WINDOWS;

	if (size != SZ_2M && size != SZ_4G)
		return -EINVAL;
	for (; id < end; id++) {
		struct npu_window *window = &client->npu->windows[id];

		if (window->owner || window->exports)
			continue;
		memset(window, 0, sizeof(*window));
		window->owner = client;
		return id;
	}
	return -ENOMEM;
}

long npu_allocate_tlb(struct npu_client *client, struct tt_allocate_tlb __user *arg)
{
	struct npu *npu = client->npu;
	struct tt_allocate_tlb call;
	int id;

	if (copy_from_user(&call.in, &arg->in, sizeof(call.in)))
		return -EFAULT;
	mutex_lock(&npu->lock);
	id = claim(client, call.in.size);
	mutex_unlock(&npu->lock);
	if (id < 0)
		return id;
	memset(&call.out, 0, sizeof(call.out));
	call.out.id = id;
	call.out.mmap_offset_uc = mmap_offset(id, TT_MMAP_TLB_UC);
	call.out.mmap_offset_wc = mmap_offset(id, TT_MMAP_TLB_WC);
	if (copy_to_user(&arg->out, &call.out, sizeof(call.out))) {
		mutex_lock(&npu->lock);
		npu->windows[id].owner = NULL;
		mutex_unlock(&npu->lock);
		return -EFAULT;
	}
	return 0;
}

long npu_free_tlb(struct npu_client *client, struct tt_free_tlb __user *arg)
{
	struct npu *npu = client->npu;
	struct npu_window *window;
	struct tt_free_tlb call;
	long ret = 0;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	if (call.id >= WINDOWS)
		return -EINVAL;
	window = &npu->windows[call.id];
	mutex_lock(&npu->lock);
	if (window->owner != client)
		ret = -EPERM;
	else if (window->mappings)
		ret = -EBUSY;
	else
		window->owner = NULL;
	mutex_unlock(&npu->lock);
	return ret;
}

/* The channel behind a tile, or -EINVAL: the stand-in has no other tiles. */
static int channel_of(const struct tt_noc_target *target)
{
	unsigned int column = target->x_end - DRAM_FIRST_X;
	unsigned int row = (target->y_end - DRAM_FIRST_Y) / PORTS_PER_CHANNEL;

	if (target->mcast || target->x_end < DRAM_FIRST_X || target->y_end < DRAM_FIRST_Y)
		return -EINVAL;
	if (column >= NPU_CHANNELS / CHANNELS_PER_COLUMN || row >= CHANNELS_PER_COLUMN)
		return -EINVAL;
	return column * CHANNELS_PER_COLUMN + row;
}

long npu_configure_tlb(struct npu_client *client, struct tt_configure_tlb __user *arg)
{
	struct npu *npu = client->npu;
	struct tt_configure_tlb call;
	struct npu_window *window;
	int channel;
	long ret = 0;

	if (copy_from_user(&call.in, &arg->in, sizeof(call.in)))
		return -EFAULT;
	if (call.in.id >= WINDOWS)
		return -EINVAL;
	window = &npu->windows[call.in.id];
	channel = channel_of(&call.in.target);
	mutex_lock(&npu->lock);
	if (window->owner != client)
		ret = -EPERM;
	else if (!IS_ALIGNED(call.in.target.addr, npu_window_size(call.in.id)))
		ret = -EINVAL;
	else if (channel < 0 || call.in.target.addr >= NPU_CHANNEL_SIZE)
		ret = -EINVAL;
	else if (window->mappings || window->exports)
		ret = -EOPNOTSUPP;	/* a chip would redirect it at once; that is not modelled here */
	if (!ret) {
		window->shows = channel * NPU_CHANNEL_SIZE + call.in.target.addr;
		window->aimed = true;
	}
	mutex_unlock(&npu->lock);
	return ret;
}

void npu_free_windows_of(struct npu_client *client)
{
	struct npu *npu = client->npu;
	unsigned int id;

	mutex_lock(&npu->lock);
	for (id = 0; id < WINDOWS; id++)
		if (npu->windows[id].owner == client)
			npu->windows[id].owner = NULL;
	mutex_unlock(&npu->lock);
}
