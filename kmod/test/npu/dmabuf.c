// SPDX-License-Identifier: GPL-2.0-only
/*
 * EXPORT_TLB_DMABUF: a window as a dma-buf of a BAR, without struct pages. The importer must do peer-to-peer DMA; it may
 * pin. The window is kept until the last export is gone, and an unbound driver revokes what is mapped.
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "npu.h"

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif

#define ENTRY_MAX	SZ_1G	/* a scatterlist entry's length has 32 bits */

struct npu_export {
	struct list_head list;
	struct npu *npu;
	struct npu_window *window;
	struct dma_buf *dmabuf;
	phys_addr_t start;
	u64 size;
	bool revoked;	/* guarded by the dma-buf's reservation */
};

static int export_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	return attachment->peer2peer ? 0 : -EOPNOTSUPP;
}

static int export_pin(struct dma_buf_attachment *attachment)
{
	struct npu_export *export = attachment->dmabuf->priv;

	return export->revoked ? -ENODEV : 0;
}

static void export_unpin(struct dma_buf_attachment *attachment)
{
}

static struct sg_table *export_map(struct dma_buf_attachment *attachment, enum dma_data_direction direction)
{
	struct npu_export *export = attachment->dmabuf->priv;
	unsigned int entries = DIV_ROUND_UP_ULL(export->size, ENTRY_MAX);
	struct scatterlist *entry;
	struct sg_table *table;
	dma_addr_t address;
	unsigned int i;
	int ret;

	if (export->revoked)
		return ERR_PTR(-ENODEV);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	ret = sg_alloc_table(table, entries, GFP_KERNEL);
	if (ret)
		goto free;
	address = dma_map_resource(attachment->dev, export->start, export->size, direction, 0);
	ret = dma_mapping_error(attachment->dev, address);
	if (ret)
		goto free_table;
	for_each_sgtable_dma_sg(table, entry, i) {
		u64 at = (u64)i * ENTRY_MAX;

		sg_set_page(entry, NULL, min_t(u64, ENTRY_MAX, export->size - at), 0);
		sg_dma_address(entry) = address + at;
		sg_dma_len(entry) = entry->length;
	}
	return table;

free_table:
	sg_free_table(table);
free:
	kfree(table);
	return ERR_PTR(ret);
}

static void export_unmap(struct dma_buf_attachment *attachment, struct sg_table *table,
			 enum dma_data_direction direction)
{
	struct npu_export *export = attachment->dmabuf->priv;

	dma_unmap_resource(attachment->dev, sg_dma_address(table->sgl), export->size, direction, 0);
	sg_free_table(table);
	kfree(table);
}

static void export_free(struct npu_export *export)
{
	struct npu *npu = export->npu;

	mutex_lock(&npu->exports_lock);
	list_del(&export->list);
	mutex_unlock(&npu->exports_lock);
	mutex_lock(&npu->lock);
	export->window->exports--;
	mutex_unlock(&npu->lock);
	put_device(&npu->dev);
	kfree(export);
}

static void export_release(struct dma_buf *dmabuf)
{
	export_free(dmabuf->priv);
}

static const struct dma_buf_ops export_ops = {
	.attach = export_attach,
	.pin = export_pin,
	.unpin = export_unpin,
	.map_dma_buf = export_map,
	.unmap_dma_buf = export_unmap,
	.release = export_release,
};

/* Checks the call and takes the window. */
static struct npu_export *export_create(struct npu_client *client, const struct tt_export_tlb_dmabuf *call)
{
	struct npu *npu = client->npu;
	struct npu_export *export;
	struct npu_window *window;
	u64 room;
	int ret;

	if (call->argsz != sizeof(*call) || call->flags || call->tlb_id >= WINDOWS)
		return ERR_PTR(-EINVAL);
	room = npu_window_size(call->tlb_id);
	if (!PAGE_ALIGNED(call->offset) || !PAGE_ALIGNED(call->size) || call->offset >= room ||
	    call->size > room - call->offset)
		return ERR_PTR(-EINVAL);
	export = kzalloc(sizeof(*export), GFP_KERNEL);
	if (!export)
		return ERR_PTR(-ENOMEM);
	window = &npu->windows[call->tlb_id];
	INIT_LIST_HEAD(&export->list);
	export->npu = npu;
	export->window = window;
	export->size = call->size ?: room - call->offset;
	mutex_lock(&npu->lock);
	ret = npu->gone ? -ENODEV : window->owner != client ? -EPERM : !window->aimed ? -ENXIO : 0;
	if (!ret) {
		export->start = pci_resource_start(npu->pdev, 4) + window->shows + call->offset;
		window->exports++;
		get_device(&npu->dev);
	}
	mutex_unlock(&npu->lock);
	if (ret) {
		kfree(export);
		return ERR_PTR(ret);
	}
	return export;
}

long npu_export_tlb_dmabuf(struct npu_client *client, struct tt_export_tlb_dmabuf __user *arg)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct tt_export_tlb_dmabuf call;
	struct npu_export *export;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	export = export_create(client, &call);
	if (IS_ERR(export))
		return PTR_ERR(export);
	info.ops = &export_ops;
	info.size = export->size;
	info.flags = O_RDWR | O_CLOEXEC;
	info.priv = export;
	export->dmabuf = dma_buf_export(&info);
	if (IS_ERR(export->dmabuf)) {
		long ret = PTR_ERR(export->dmabuf);

		export_free(export);
		return ret;
	}
	mutex_lock(&client->npu->exports_lock);
	list_add(&export->list, &client->npu->exports);
	mutex_unlock(&client->npu->exports_lock);
	call.fd = get_unused_fd_flags(O_CLOEXEC);
	if (call.fd < 0) {
		dma_buf_put(export->dmabuf);
		return call.fd;
	}
	if (copy_to_user(arg, &call, sizeof(call))) {
		put_unused_fd(call.fd);
		dma_buf_put(export->dmabuf);
		return -EFAULT;
	}
	fd_install(call.fd, export->dmabuf->file);
	return 0;
}

/* Every importer stops and unmaps. A dma-buf in this list is valid: its release waits for exports_lock. */
void npu_revoke_dmabufs(struct npu *npu)
{
	struct npu_export *export;

	mutex_lock(&npu->exports_lock);
	list_for_each_entry(export, &npu->exports, list) {
		dma_resv_lock(export->dmabuf->resv, NULL);
		if (!export->revoked) {
			export->revoked = true;
			dma_buf_move_notify(export->dmabuf);
		}
		dma_resv_unlock(export->dmabuf->resv);
	}
	mutex_unlock(&npu->exports_lock);
}
