// SPDX-License-Identifier: GPL-2.0-only
/*
 * mmap of windows and of whole BARs: page frame numbers without struct pages as far as the kernel's memory management
 * is concerned (VM_PFNMAP), as tt-kmd does it.
 *
 * Uncached and write-combined offsets are both mapped cached. The memory behind the BAR is RAM of the host, and x86
 * does not let one page have two cache attributes: soft-RoCE's kernel mapping of it is cached.
 */
#include "npu.h"

static void window_opened(struct vm_area_struct *vma)
{
	struct npu_client *client = vma->vm_file->private_data;
	struct npu_window *window = vma->vm_private_data;

	mutex_lock(&client->npu->lock);
	window->mappings++;
	mutex_unlock(&client->npu->lock);
}

static void window_closed(struct vm_area_struct *vma)
{
	struct npu_client *client = vma->vm_file->private_data;
	struct npu_window *window = vma->vm_private_data;

	mutex_lock(&client->npu->lock);
	window->mappings--;
	mutex_unlock(&client->npu->lock);
}

static int window_may_split(struct vm_area_struct *vma, unsigned long address)
{
	return -EINVAL;
}

static const struct vm_operations_struct window_ops = {
	.open = window_opened,
	.close = window_closed,
	.may_split = window_may_split,
};

/* Offsets count from the start of the DRAM. */
static int map_dram(struct npu *npu, struct vm_area_struct *vma, u64 offset)
{
	phys_addr_t dram = pci_resource_start(npu->pdev, 4);

	return io_remap_pfn_range(vma, vma->vm_start, PHYS_PFN(dram + offset), vma->vm_end - vma->vm_start,
				  vma->vm_page_prot);
}

static int map_window(struct npu_client *client, struct vm_area_struct *vma, u64 place)
{
	u64 size = vma->vm_end - vma->vm_start;
	struct npu *npu = client->npu;
	struct npu_window *window;
	unsigned int id;
	u64 rest;
	int ret;

	if (place < NPU_BAR0_SIZE)
		id = div64_u64_rem(place, SZ_2M, &rest);
	else
		id = SMALL_WINDOWS + div64_u64_rem(place - NPU_BAR0_SIZE, SZ_4G, &rest);
	if (rest || id >= WINDOWS || id == KERNEL_WINDOW || size > npu_window_size(id))
		return -EINVAL;
	window = &npu->windows[id];
	mutex_lock(&npu->lock);
	if (npu->gone) {
		ret = -ENODEV;
	} else if (window->owner != client) {
		ret = -EPERM;
	} else if (!window->aimed) {
		ret = -ENXIO;	/* on a chip it would show what its last owner aimed it at */
	} else {
		ret = map_dram(npu, vma, window->shows);
		if (!ret)
			window->mappings++;
	}
	mutex_unlock(&npu->lock);
	if (ret)
		return ret;
	vma->vm_ops = &window_ops;
	vma->vm_private_data = window;
	return 0;
}

static int map_bar(struct npu *npu, struct vm_area_struct *vma, int bar, u64 place)
{
	int ret = -ENODEV;

	vma->vm_pgoff = PHYS_PFN(place);
	mutex_lock(&npu->lock);
	if (!npu->gone)
		ret = vm_iomap_memory(vma, pci_resource_start(npu->pdev, bar), pci_resource_len(npu->pdev, bar));
	mutex_unlock(&npu->lock);
	return ret;
}

static int map_outside(struct npu *npu, struct vm_area_struct *vma)
{
	if (vma->vm_end - vma->vm_start > NPU_OUTSIDE_SIZE)
		return -EINVAL;
	return map_dram(npu, vma, NPU_OUTSIDE_OFFSET - NPU_BAR4_OFFSET);
}

int npu_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct npu_client *client = file->private_data;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 place = offset & ((1ULL << TT_MMAP_KIND_SHIFT) - 1);

	switch (offset >> TT_MMAP_KIND_SHIFT) {
	case TT_MMAP_BAR0_UC:
	case TT_MMAP_BAR0_WC:
		return map_bar(client->npu, vma, 0, place);
	case TT_MMAP_BAR4_UC:
	case TT_MMAP_BAR4_WC:
		return map_bar(client->npu, vma, 4, place);
	case TT_MMAP_TLB_UC:
	case TT_MMAP_TLB_WC:
		return map_window(client, vma, place);
	case NPU_MMAP_OUTSIDE:
		return map_outside(client->npu, vma);
	default:
		return -EINVAL;
	}
}
