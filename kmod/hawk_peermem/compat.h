/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between kernels. Built against 6.1 and 6.12; nothing in between was tried. */
#ifndef HAWK_PEERMEM_COMPAT_H
#define HAWK_PEERMEM_COMPAT_H

#include <linux/mm.h>
#include <linux/version.h>

/*
 * hawk_follow_pfn - the page frame behind an address of a VM_PFNMAP area
 * @writable: set to whether the process may write there
 *
 * The caller holds mmap_lock. Fails with -EINVAL where nothing is mapped.
 */
static inline int hawk_follow_pfn(struct vm_area_struct *vma, unsigned long address, unsigned long *pfn,
				  bool *writable)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
	struct follow_pfnmap_args args = { .vma = vma, .address = address };
	int ret = follow_pfnmap_start(&args);

	if (ret)
		return ret;
	*pfn = args.pfn;
	*writable = args.writable;
	follow_pfnmap_end(&args);
	return 0;
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	spinlock_t *lock;
	pte_t *entry;
	int ret = follow_pte(vma, address, &entry, &lock);

	if (ret)
		return ret;
	*pfn = pte_pfn(ptep_get(entry));
	*writable = pte_write(ptep_get(entry));
	pte_unmap_unlock(entry, lock);
	return 0;
#else
	*writable = vma->vm_flags & VM_WRITE;
	return follow_pfn(vma, address, pfn);
#endif
}

#endif
