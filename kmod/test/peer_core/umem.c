// SPDX-License-Identifier: GPL-2.0-only
/*
 * One registration: the client's functions called in the real core's order and under the same lock, a failure injected
 * after any step, what the client gave checked, and its invalidation.
 */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "core.h"

/* The steps of a registration, in order. A failure and a pause can be asked for after each. */
enum step {
	STEP_NONE,
	STEP_ACQUIRE,
	STEP_ID,
	STEP_GET_PAGES,
	STEP_DMA_MAP,
};

static int fail_after;
module_param(fail_after, int, 0644);
MODULE_PARM_DESC(fail_after, "fail with EIO after 1 acquire, 2 the core's id, 3 get_pages, 4 dma_map");

static int pause_after;
module_param(pause_after, int, 0644);
MODULE_PARM_DESC(pause_after, "the step after which to pause, as for fail_after");

static int pause_ms;
module_param(pause_ms, int, 0644);
MODULE_PARM_DESC(pause_ms, "how long to pause");

static int after(enum step step)
{
	if (READ_ONCE(pause_after) == step)
		msleep(READ_ONCE(pause_ms));
	return READ_ONCE(fail_after) == step ? -EIO : 0;
}

static void umem_free(struct kref *kref)
{
	struct peer_umem *umem = container_of(kref, struct peer_umem, kref);

	mmdrop(umem->umem.owning_mm);
	atomic_dec(&peer_live);
	kfree(umem);
}

/* The table must cover the range, rounded out to pages, with whole pages. */
static int check_table(struct peer_umem *umem, int entries)
{
	unsigned long start = umem->umem.address & PAGE_MASK;
	size_t want = PAGE_ALIGN(umem->umem.address + umem->umem.length) - start;
	struct sg_table *table = peer_umem_table(umem);
	struct scatterlist *entry;
	size_t have = 0;
	int i;

	if (entries < 1 || entries != table->nents || table->nents != table->orig_nents) {
		peer_violation("dma_map: %d entries said, %u and %u in the table", entries, table->nents,
			       table->orig_nents);
		return -EINVAL;
	}
	for_each_sg(table->sgl, entry, entries, i) {
		if (!PAGE_ALIGNED(sg_dma_address(entry)) || !sg_dma_len(entry) ||
		    !PAGE_ALIGNED(sg_dma_len(entry))) {
			peer_violation("dma_map: entry %d is %pad, %u bytes", i, &sg_dma_address(entry),
				       sg_dma_len(entry));
			return -EINVAL;
		}
		have += sg_dma_len(entry);
	}
	if (have != want) {
		peer_violation("dma_map: %zu bytes, not %zu", have, want);
		return -EINVAL;
	}
	return 0;
}

static void unmap(struct peer_umem *umem)
{
	const struct peer_memory_client *ops = umem->client->ops;
	int ret;

	peer_event("dma_unmap");
	ret = ops->dma_unmap(peer_umem_table(umem), umem->context, umem->dma_device);
	if (ret)
		peer_violation("dma_unmap returned %d", ret);
	peer_event("put_pages");
	ops->put_pages(peer_umem_table(umem), umem->context);
}

/* The steps under the registration's lock. On failure those that were done are undone. */
static int map(struct peer_umem *umem)
{
	const struct peer_memory_client *ops = umem->client->ops;
	int entries = 0;
	int ret;

	ret = ops->get_pages(umem->umem.address, umem->umem.length, 1, !umem->umem.writable, NULL, umem->context,
			     umem->id);
	peer_event("get_pages %d", ret);
	if (ret)
		return ret;
	ret = after(STEP_GET_PAGES);
	if (ret)
		goto put;
	ret = ops->dma_map(peer_umem_table(umem), umem->context, umem->dma_device, 0, &entries);
	peer_event("dma_map %d", ret);
	if (ret)
		goto put;
	if (ops->get_page_size(umem->context) != PAGE_SIZE)
		peer_violation("a page size of %lu, which this core does not trim to",
			       ops->get_page_size(umem->context));
	ret = check_table(umem, entries) ?: after(STEP_DMA_MAP);
	if (ret) {
		unmap(umem);
		return ret;
	}
	umem->state = PEER_MAPPED;
	return 0;

put:
	peer_event("put_pages");
	ops->put_pages(peer_umem_table(umem), umem->context);
	return ret;
}

/**
 * peer_umem_get - offer a range of the calling process to the clients
 * @address: aligned to nothing
 * @size: bytes, aligned to nothing
 * @writable: the registration allows writing
 * @dma_device: NULL for software RDMA
 * @stop: see struct peer_umem
 * @device: its argument
 *
 * -EFAULT: nobody takes it.
 */
struct peer_umem *peer_umem_get(unsigned long address, size_t size, bool writable, struct device *dma_device,
				void (*stop)(void *device), void *device)
{
	struct peer_umem *umem;
	int ret;

	umem = kzalloc(sizeof(*umem), GFP_KERNEL);
	if (!umem)
		return ERR_PTR(-ENOMEM);
	kref_init(&umem->kref);
	mutex_init(&umem->lock);
	umem->umem.address = address;
	umem->umem.iova = address;
	umem->umem.length = size;
	umem->umem.writable = writable;
	umem->umem.owning_mm = current->mm;
	umem->dma_device = dma_device;
	umem->stop = stop;
	umem->device = device;
	mmgrab(current->mm);
	atomic_inc(&peer_live);

	umem->client = peer_clients_acquire(address, size, &umem->context);
	ret = umem->client ? after(STEP_ACQUIRE) : -EFAULT;
	if (!umem->client)
		goto free;
	if (ret)
		goto release;
	mutex_lock(&umem->lock);
	ret = xa_alloc(&umem->client->umems, &umem->id, umem, xa_limit_31b, GFP_KERNEL) ?: after(STEP_ID) ?: map(umem);
	if (ret && umem->id)
		xa_erase(&umem->client->umems, umem->id);
	mutex_unlock(&umem->lock);
	if (ret)
		goto release;
	return umem;

release:
	peer_client_release(umem->client, umem->context);
free:
	kref_put(&umem->kref, umem_free);
	return ERR_PTR(ret);
}

/* The end of a registration; the device has stopped using it. */
void peer_umem_release(struct peer_umem *umem)
{
	mutex_lock(&umem->lock);
	if (umem->state == PEER_MAPPED)
		unmap(umem);
	umem->state = PEER_UNMAPPED;
	mutex_unlock(&umem->lock);
	xa_erase(&umem->client->umems, umem->id);
	peer_client_release(umem->client, umem->context);
	kref_put(&umem->kref, umem_free);
}

/* What a client calls when it loses memory. May come for a registration that has ended or is just ending. */
int peer_umem_invalidate(struct peer_client *client, u32 id)
{
	struct peer_umem *umem;

	xa_lock(&client->umems);
	umem = xa_load(&client->umems, id);
	if (umem)
		kref_get(&umem->kref);
	xa_unlock(&client->umems);
	if (!umem) {
		peer_event("invalidate ended");
		return 0;
	}
	mutex_lock(&umem->lock);
	peer_event("invalidate %s", umem->state == PEER_MAPPED ? "mapped" : "unmapped");
	if (umem->state == PEER_MAPPED) {
		if (umem->stop)
			umem->stop(umem->device);
		if (!peer_client_unmaps(client))
			unmap(umem);
		umem->state = PEER_INVALIDATED;
		/* rxe goes on using the entries; it takes no notice of invalidations. */
		if (umem->dma_device)
			memset(peer_umem_table(umem), 0, sizeof(struct sg_table));
	}
	mutex_unlock(&umem->lock);
	kref_put(&umem->kref, umem_free);
	return 0;
}
