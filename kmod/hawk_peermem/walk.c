// SPDX-License-Identifier: GPL-2.0-only
/* From a user range to the page frames behind it. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "compat.h"
#include "peermem.h"
#include "region.h"

#define FIRST_ROOM	4

static int hold_file(struct hawk_region *region, struct file *file)
{
	struct file **files;

	if (region->file_count && region->files[region->file_count - 1] == file)
		return 0;
	files = krealloc_array(region->files, region->file_count + 1, sizeof(*files), GFP_KERNEL);
	if (!files)
		return -ENOMEM;
	region->files = files;
	files[region->file_count++] = get_file(file);
	return 0;
}

static int add_page(struct hawk_region *region, phys_addr_t page)
{
	struct hawk_run *last = region->run_count ? &region->runs[region->run_count - 1] : NULL;

	if (last && last->start + last->size == page && last->size < HAWK_RUN_MAX) {
		last->size += PAGE_SIZE;
		return 0;
	}
	if (region->run_count == region->run_room) {
		unsigned int room = region->run_room ? 2 * region->run_room : FIRST_ROOM;
		struct hawk_run *runs = krealloc_array(region->runs, room, sizeof(*runs), GFP_KERNEL);

		if (!runs)
			return -ENOMEM;
		region->runs = runs;
		region->run_room = room;
	}
	region->runs[region->run_count++] = (struct hawk_run){ .start = page, .size = PAGE_SIZE };
	return 0;
}

static int walk_vma(struct hawk_region *region, struct vm_area_struct *vma, unsigned long address, unsigned long end)
{
	for (; address < end; address += PAGE_SIZE) {
		unsigned long pfn;
		bool writable;
		int ret;

		ret = hawk_follow_pfn(vma, address, &pfn, &writable);
		if (ret)
			return -EFAULT;
		ret = add_page(region, PFN_PHYS((phys_addr_t)pfn));
		if (ret)
			return ret;
		region->writable &= writable && (vma->vm_flags & VM_SHARED);
		if (!(address & (SZ_2M - 1))) {
			if (fatal_signal_pending(current))
				return -EINTR;
			cond_resched();
		}
	}
	return 0;
}

/* The module whose driver made the mapping, if that is the driver that this module serves. */
static struct module *served(const struct vm_area_struct *vma)
{
	struct module *owner;

	if (!(vma->vm_flags & VM_PFNMAP) || !vma->vm_file)
		return NULL;
	owner = vma->vm_file->f_op->owner;
	return owner && !strcmp(module_name(owner), hawk_owner()) ? owner : NULL;
}

/**
 * hawk_walk_begins - whether a range can be the driver's
 * @address: where it begins
 *
 * Cheap, since the core offers ranges of every kind.
 */
bool hawk_walk_begins(unsigned long address)
{
	struct vm_area_struct *vma;
	bool ours;

	mmap_read_lock(current->mm);
	vma = vma_lookup(current->mm, address);
	ours = vma && served(vma);
	mmap_read_unlock(current->mm);
	return ours;
}

/**
 * hawk_walk - fill in a region's files, runs, owner and writable
 * @region: start and size are set, the rest is empty
 *
 * The range may span several mappings, if they follow each other without a gap and all belong to the driver.
 *
 * -ENODEV: not the driver's, or not all of it. -EFAULT: part of it has no page. -ENOMEM. -EINTR: the process is killed.
 * After an error the caller calls hawk_walk_forget().
 */
int hawk_walk(struct hawk_region *region)
{
	unsigned long end = region->start + region->size;
	struct mm_struct *mm = current->mm;
	unsigned long address, next;
	int ret = 0;

	region->writable = true;
	mmap_read_lock(mm);
	for (address = region->start; !ret && address < end; address = next) {
		struct vm_area_struct *vma = vma_lookup(mm, address);
		struct module *owner = vma ? served(vma) : NULL;

		if (!owner || (region->owner && region->owner != owner)) {
			ret = -ENODEV;
			break;
		}
		region->owner = owner;	/* stays loaded: one of its files is held */
		next = min(vma->vm_end, end);
		ret = hold_file(region, vma->vm_file) ?: walk_vma(region, vma, address, next);
	}
	mmap_read_unlock(mm);
	return ret;
}

/* Undoes hawk_walk(). */
void hawk_walk_forget(struct hawk_region *region)
{
	unsigned int i;

	for (i = 0; i < region->file_count; i++)
		fput(region->files[i]);
	kfree(region->files);
	kfree(region->runs);
	region->files = NULL;
	region->file_count = 0;
	region->runs = NULL;
	region->run_count = 0;
	region->run_room = 0;
	region->owner = NULL;
}
