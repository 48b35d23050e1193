// SPDX-License-Identifier: GPL-2.0-only
/*
 * The life of a registered range.
 *
 * Locks. The core calls get_pages and dma_map with its own lock of the registration, and takes the same lock when it is
 * told of an invalidation. The notifier tells it, and runs with mmap_lock. So whatever needs mmap_lock, which is the
 * page walk and the notifier's insertion, is done in create (the core's acquire, without that lock), and get_pages and
 * dma_map need nothing but region->lock, which is never held around the core's function.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/file.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "peermem.h"
#include "region.h"

/* How often the range may change during its walk before the registration is given up. */
#define WALK_TRIES	8

static void unmap_locked(struct hawk_region *region)
{
	lockdep_assert_held(&region->lock);
	if (region->mapped)
		hawk_dma_unmap(region);
	region->mapped = false;
}

/*
 * Part of the range is unmapped, moved, protected or zapped, or the process ends. When this returns the pages may belong
 * to somebody else.
 */
static bool invalidate(struct mmu_interval_notifier *notifier, const struct mmu_notifier_range *range,
		       unsigned long sequence)
{
	struct hawk_region *region = container_of(notifier, struct hawk_region, notifier);
	bool first, tell;

	/* The core sleeps. Only the OOM reaper cannot, and it leaves VM_PFNMAP areas alone. */
	if (!mmu_notifier_range_blockable(range))
		return false;
	mutex_lock(&region->lock);
	mmu_interval_set_seq(notifier, sequence);
	first = !region->dead;
	tell = first && region->has_core_context;
	region->dead = true;
	mutex_unlock(&region->lock);
	if (!tell)
		return true;
	pr_debug("lost %#lx+%#zx: event %d by %s[%d]\n", region->start, region->size, range->event,
		 current->comm, current->pid);
	atomic64_inc(&hawk_counters.invalidated);
	hawk_client_invalidate(region->core_context);
	/* The core has stopped its device and, knowing PEER_MEM_INVALIDATE_UNMAPS, has left the rest to us. */
	mutex_lock(&region->lock);
	unmap_locked(region);
	mutex_unlock(&region->lock);
	return true;
}

static const struct mmu_interval_notifier_ops notifier_ops = { .invalidate = invalidate };

/* Walks until nothing has changed meanwhile. */
static int walk_in_peace(struct hawk_region *region)
{
	int try, ret;

	for (try = 0; try < WALK_TRIES; try++) {
		unsigned long sequence = mmu_interval_read_begin(&region->notifier);
		bool retry;

		ret = hawk_walk(region);
		if (ret)
			return ret;
		mutex_lock(&region->lock);
		retry = mmu_interval_read_retry(&region->notifier, sequence);
		if (!retry)
			region->dead = false;
		mutex_unlock(&region->lock);
		if (!retry)
			return 0;
		hawk_walk_forget(region);
	}
	return -EAGAIN;
}

static bool count_in(size_t size)
{
	if (atomic64_inc_return(&hawk_counters.regions) > hawk_max_regions()) {
		atomic64_dec(&hawk_counters.regions);
		return false;
	}
	atomic64_add(size, &hawk_counters.bytes);
	return true;
}

static void count_out(size_t size)
{
	atomic64_sub(size, &hawk_counters.bytes);
	atomic64_dec(&hawk_counters.regions);
}

/**
 * hawk_region_create - take a range of the calling process
 * @address: user address, aligned to nothing
 * @size: bytes, aligned to nothing
 *
 * Returns the region or an error: -ENODEV, not the driver's; -EINVAL, a range that wraps; -ENOSPC, over a limit of the
 * module; -ENXIO, a page outside the BARs of the driver's functions; -EFAULT, part of the range shows nothing;
 * -EAGAIN, the range keeps changing; -EINTR; -ENOMEM.
 */
struct hawk_region *hawk_region_create(unsigned long address, size_t size)
{
	struct hawk_region *region;
	int ret;

	if (!size || address + size < address || PAGE_ALIGN(address + size) < address)
		return ERR_PTR(-EINVAL);
	if (!hawk_walk_begins(address))
		return ERR_PTR(-ENODEV);
	region = kzalloc(sizeof(*region), GFP_KERNEL);
	if (!region)
		return ERR_PTR(-ENOMEM);
	mutex_init(&region->lock);
	region->dead = true;
	region->start = address & PAGE_MASK;
	region->size = PAGE_ALIGN(address + size) - region->start;
	ret = -ENOSPC;
	if (region->size > hawk_max_region_bytes() || !count_in(region->size))
		goto free;
	ret = mmu_interval_notifier_insert(&region->notifier, current->mm, region->start, region->size, &notifier_ops);
	if (ret)
		goto uncount;
	ret = walk_in_peace(region);
	if (ret)
		goto remove;
	region->pdev = hawk_bars_find(region);
	if (!region->pdev) {
		ret = -ENXIO;
		goto remove;
	}
	return region;

remove:
	mmu_interval_notifier_remove(&region->notifier);
	hawk_walk_forget(region);
uncount:
	count_out(region->size);
free:
	kfree(region);
	return ERR_PTR(ret);
}

/* The last use of a region. Waits for an invalidation that is under way, so it must not be called from one. */
void hawk_region_destroy(struct hawk_region *region)
{
	mmu_interval_notifier_remove(&region->notifier);
	mutex_lock(&region->lock);
	unmap_locked(region);
	mutex_unlock(&region->lock);
	sg_free_table(&region->table);
	hawk_walk_forget(region);
	pci_dev_put(region->pdev);
	count_out(region->size);
	kfree(region);
}

/**
 * hawk_region_attach - from now on the core is told of invalidations
 * @region: what was created
 * @core_context: how the core calls it
 * @write: the registration allows writing
 *
 * -EFAULT: the range has changed since it was created. -EACCES: the process may only read it.
 */
int hawk_region_attach(struct hawk_region *region, u64 core_context, bool write)
{
	int ret = 0;

	mutex_lock(&region->lock);
	if (region->dead) {
		ret = -EFAULT;
	} else if (write && !region->writable) {
		ret = -EACCES;
	} else {
		region->core_context = core_context;
		region->has_core_context = true;
	}
	mutex_unlock(&region->lock);
	return ret;
}

/* hawk_dma_map(), once, unless the range has changed (-EFAULT). */
int hawk_region_map(struct hawk_region *region, struct sg_table *table, struct device *device)
{
	int ret;

	mutex_lock(&region->lock);
	if (region->dead)
		ret = -EFAULT;
	else if (region->mapped)
		ret = -EBUSY;
	else
		ret = hawk_dma_map(region, table, device);
	if (!ret)
		region->mapped = true;
	mutex_unlock(&region->lock);
	return ret;
}

/* Does nothing if an invalidation was faster. */
void hawk_region_unmap(struct hawk_region *region)
{
	mutex_lock(&region->lock);
	unmap_locked(region);
	mutex_unlock(&region->lock);
}
