// SPDX-License-Identifier: GPL-2.0-only
/*
 * The software HCA: registers a range through the peer-memory clients, or imports a dma-buf, reads and writes it with
 * the CPU, and obeys an invalidation by stopping first. /dev/hawk_soft_hca, see hca_abi.h.
 */
#include <linux/delay.h>
#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/io.h>
#include <linux/kthread.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "core.h"
#include "hca.h"
#include "hca_abi.h"

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif

#define COPY_MAX	SZ_1M
#define RUN_PAUSE_US	50

/**
 * struct session - an open file
 * @setup: held while a range is registered, imported or given up. mmap_lock is taken under it
 * @umem: the registration, or NULL
 * @attachment: the import, or NULL
 * @skip: bytes in the first entry before the range begins
 * @size: of the range
 * @deaf: goes on after an invalidation
 * @run_lock: guards what follows. An invalidation takes it under mmap_lock, so nothing that touches user memory is
 *            done under it
 * @table: the range, as DMA addresses. The entries are the client's or exporter's and live until the range is given up
 * @imported: the exporter's own table, while mapped
 * @invalidated: the memory has gone
 * @worker: writes to @target, or NULL
 * @mapped: the page that holds @target
 * @target: where the worker writes
 * @accesses: how often it has
 * @accesses_when_stopped: how often it had when the invalidation was answered
 */
struct session {
	struct mutex setup;
	struct peer_umem *umem;
	struct dma_buf_attachment *attachment;
	size_t skip;
	size_t size;
	bool deaf;

	struct mutex run_lock;
	struct sg_table table;
	struct sg_table *imported;
	bool invalidated;
	struct task_struct *worker;
	void *mapped;
	u64 *target;
	u64 accesses;
	u64 accesses_when_stopped;
};

static int work(void *argument)
{
	struct session *session = argument;

	while (!kthread_should_stop()) {
		WRITE_ONCE(*session->target, ++session->accesses);
		usleep_range(RUN_PAUSE_US, 2 * RUN_PAUSE_US);
	}
	return 0;
}

static void end_work(struct session *session)
{
	if (session->worker)
		kthread_stop(session->worker);
	session->worker = NULL;
	if (session->mapped)
		memunmap(session->mapped);
	session->mapped = NULL;
}

/* The fence: when this returns, nothing is written any more. */
static void stop(void *argument)
{
	struct session *session = argument;

	mutex_lock(&session->run_lock);
	if (!session->deaf)
		end_work(session);
	session->invalidated = true;
	session->accesses_when_stopped = READ_ONCE(session->accesses);
	mutex_unlock(&session->run_lock);
}

/* The physical address of a byte of the range, and how many bytes follow it without a gap. */
static phys_addr_t resolve(struct session *session, u64 offset, size_t *room)
{
	struct scatterlist *entry;
	int i;

	offset += session->skip;
	for_each_sgtable_dma_sg(&session->table, entry, i) {
		if (offset < sg_dma_len(entry)) {
			*room = sg_dma_len(entry) - offset;
			return hca_device_resolve(sg_dma_address(entry)) + offset;
		}
		offset -= sg_dma_len(entry);
	}
	*room = 0;
	return 0;
}

static int check_range(struct session *session, u64 offset, u64 size)
{
	if (!session->umem && !session->attachment)
		return -EINVAL;
	if (session->invalidated)
		return -ENODEV;
	return offset > session->size || size > session->size - offset ? -ERANGE : 0;
}

/* One piece of a copy that lies in one entry and one mapping. */
static ssize_t copy_piece(struct session *session, u64 offset, void *buffer, size_t size, bool to_device)
{
	phys_addr_t address;
	size_t within, room;
	void *mapped;

	address = resolve(session, offset, &room);
	size = min(size, room);
	if (!size)
		return -ERANGE;
	within = offset_in_page(address);
	mapped = memremap(address - within, PAGE_ALIGN(within + size), MEMREMAP_WB);
	if (!mapped)
		return -ENOMEM;
	if (to_device)
		memcpy(mapped + within, buffer, size);
	else
		memcpy(buffer, mapped + within, size);
	memunmap(mapped);
	return size;
}

static int copy_range(struct session *session, u64 offset, void *buffer, size_t size, bool to_device)
{
	ssize_t done;
	int ret;

	mutex_lock(&session->run_lock);
	ret = check_range(session, offset, size);
	while (!ret && size) {
		done = copy_piece(session, offset, buffer, size, to_device);
		if (done < 0) {
			ret = done;
			break;
		}
		offset += done;
		buffer += done;
		size -= done;
	}
	mutex_unlock(&session->run_lock);
	return ret;
}

static long do_copy(struct session *session, const struct hca_copy *call)
{
	void __user *user = u64_to_user_ptr(call->buffer);
	void *buffer;
	u64 done;
	int ret = 0;

	buffer = kvmalloc(COPY_MAX, GFP_KERNEL);
	if (!buffer)
		return -ENOMEM;
	for (done = 0; !ret && done < call->size; done += COPY_MAX) {
		size_t size = min_t(u64, COPY_MAX, call->size - done);

		if (call->to_device && copy_from_user(buffer, user + done, size))
			ret = -EFAULT;
		if (!ret)
			ret = copy_range(session, call->offset + done, buffer, size, call->to_device);
		if (!ret && !call->to_device && copy_to_user(user + done, buffer, size))
			ret = -EFAULT;
	}
	kvfree(buffer);
	return ret;
}

static long do_run(struct session *session, u64 offset)
{
	phys_addr_t address;
	size_t within, room;
	long ret;

	if (!IS_ALIGNED(offset + session->skip, sizeof(u64)))
		return -EINVAL;
	mutex_lock(&session->run_lock);
	ret = session->worker ? -EBUSY : check_range(session, offset, sizeof(u64));
	if (ret)
		goto unlock;
	address = resolve(session, offset, &room);
	within = offset_in_page(address);
	session->mapped = memremap(address - within, PAGE_SIZE, MEMREMAP_WB);
	if (!session->mapped) {
		ret = -ENOMEM;
		goto unlock;
	}
	session->target = session->mapped + within;
	session->worker = kthread_run(work, session, "hawk_soft_hca");
	if (IS_ERR(session->worker)) {
		ret = PTR_ERR(session->worker);
		session->worker = NULL;
		end_work(session);
	}
unlock:
	mutex_unlock(&session->run_lock);
	return ret;
}

static long do_register(struct session *session, const struct hca_register *call)
{
	struct peer_umem *umem;
	long ret = 0;

	mutex_lock(&session->setup);
	if (session->umem || session->attachment) {
		ret = -EBUSY;
		goto unlock;
	}
	session->deaf = call->flags & HCA_DEAF;
	session->skip = offset_in_page(call->address);
	session->size = call->size;
	umem = peer_umem_get(call->address, call->size, true, hca_device(), stop, session);
	if (IS_ERR(umem)) {
		ret = PTR_ERR(umem);
		goto unlock;
	}
	mutex_lock(&umem->lock);
	mutex_lock(&session->run_lock);
	session->table = *peer_umem_table(umem);
	session->umem = umem;
	mutex_unlock(&session->run_lock);
	mutex_unlock(&umem->lock);
unlock:
	mutex_unlock(&session->setup);
	return ret;
}

/* The exporter takes the memory away: stop, then give the mapping back. Called with the dma-buf's reservation. */
static void moved(struct dma_buf_attachment *attachment)
{
	struct session *session = attachment->importer_priv;

	peer_event("move_notify");
	stop(session);
	if (session->imported)
		dma_buf_unmap_attachment(attachment, session->imported, DMA_BIDIRECTIONAL);
	session->imported = NULL;
}

static const struct dma_buf_attach_ops attach_ops = {
	.allow_peer2peer = true,
	.move_notify = moved,
};

static long do_import(struct session *session, const struct hca_import *call)
{
	struct dma_buf_attachment *attachment;
	struct sg_table *table;
	struct dma_buf *dmabuf;
	long ret = 0;

	dmabuf = dma_buf_get(call->fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	mutex_lock(&session->setup);
	if (session->umem || session->attachment) {
		ret = -EBUSY;
		goto unlock;
	}
	attachment = dma_buf_dynamic_attach(dmabuf, hca_device(), &attach_ops, session);
	if (IS_ERR(attachment)) {
		ret = PTR_ERR(attachment);
		goto unlock;
	}
	session->deaf = call->flags & HCA_DEAF;
	session->skip = 0;
	session->size = dmabuf->size;
	dma_resv_lock(dmabuf->resv, NULL);
	table = dma_buf_map_attachment(attachment, DMA_BIDIRECTIONAL);
	if (!IS_ERR(table)) {
		session->imported = table;
		mutex_lock(&session->run_lock);
		session->table = *table;
		session->attachment = attachment;
		mutex_unlock(&session->run_lock);
	}
	dma_resv_unlock(dmabuf->resv);
	if (IS_ERR(table)) {
		ret = PTR_ERR(table);
		dma_buf_detach(dmabuf, attachment);
	}
unlock:
	mutex_unlock(&session->setup);
	if (ret)
		dma_buf_put(dmabuf);
	return ret;
}

static long do_status(struct session *session, struct hca_status __user *user)
{
	struct hca_status status;

	mutex_lock(&session->run_lock);
	status = (struct hca_status){
		.accesses = READ_ONCE(session->accesses),
		.accesses_when_stopped = session->accesses_when_stopped,
		.invalidated = session->invalidated,
		.mappings = hca_device_mappings(),
	};
	mutex_unlock(&session->run_lock);
	return copy_to_user(user, &status, sizeof(status)) ? -EFAULT : 0;
}

static long hca_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct session *session = file->private_data;
	void __user *user = (void __user *)arg;
	union {
		struct hca_register range;
		struct hca_import import;
		struct hca_copy copy;
		struct hca_run run;
	} call;

	if (cmd == HCA_STATUS)
		return do_status(session, user);
	if (_IOC_SIZE(cmd) > sizeof(call) || copy_from_user(&call, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	switch (cmd) {
	case HCA_REGISTER:
		return do_register(session, &call.range);
	case HCA_IMPORT:
		return do_import(session, &call.import);
	case HCA_COPY:
		return do_copy(session, &call.copy);
	case HCA_RUN:
		return do_run(session, call.run.offset);
	default:
		return -ENOTTY;
	}
}

static int hca_open(struct inode *inode, struct file *file)
{
	struct session *session = kzalloc(sizeof(*session), GFP_KERNEL);

	if (!session)
		return -ENOMEM;
	mutex_init(&session->setup);
	mutex_init(&session->run_lock);
	file->private_data = session;
	return 0;
}

/* Deregistration: the HCA stops, then the range is given up. */
static int hca_release(struct inode *inode, struct file *file)
{
	struct session *session = file->private_data;
	struct dma_buf_attachment *attachment = session->attachment;

	mutex_lock(&session->run_lock);
	end_work(session);
	mutex_unlock(&session->run_lock);
	if (session->umem)
		peer_umem_release(session->umem);
	if (attachment) {
		struct dma_buf *dmabuf = attachment->dmabuf;

		dma_resv_lock(dmabuf->resv, NULL);
		if (session->imported)
			dma_buf_unmap_attachment(attachment, session->imported, DMA_BIDIRECTIONAL);
		dma_resv_unlock(dmabuf->resv);
		dma_buf_detach(dmabuf, attachment);
		dma_buf_put(dmabuf);
	}
	kfree(session);
	return 0;
}

static const struct file_operations hca_fops = {
	.owner = THIS_MODULE,
	.open = hca_open,
	.release = hca_release,
	.unlocked_ioctl = hca_ioctl,
};

static struct miscdevice hca_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "hawk_soft_hca",
	.fops = &hca_fops,
};

int peer_hca_init(void)
{
	int ret = hca_device_init();

	if (ret)
		return ret;
	ret = misc_register(&hca_misc);
	if (ret)
		hca_device_exit();
	return ret;
}

void peer_hca_exit(void)
{
	misc_deregister(&hca_misc);
	hca_device_exit();
}
