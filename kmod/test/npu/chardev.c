// SPDX-License-Identifier: GPL-2.0-only
/* /dev/tenstorrent/N: open files and their calls. */
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "npu.h"

#define NAME		"tenstorrent"
#define MINORS		32

static dev_t first;
static DEFINE_IDA(minors);

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
static char *node_name(const struct device *dev, umode_t *mode)
#else
static char *node_name(struct device *dev, umode_t *mode)
#endif
{
	if (mode)
		*mode = 0666;
	return kasprintf(GFP_KERNEL, NAME "/%u", MINOR(dev->devt));
}

static struct class npu_class = { .name = NAME, .devnode = node_name };

/* A file that was opened before a reset, or before the chip went, is of no use. */
static int check(const struct npu_client *client)
{
	struct npu *npu = client->npu;
	int ret;

	mutex_lock(&npu->lock);
	ret = npu->gone || npu->generation != client->generation ? -ENODEV : 0;
	mutex_unlock(&npu->lock);
	return ret;
}

static int npu_open(struct inode *inode, struct file *file)
{
	struct npu *npu = container_of(inode->i_cdev, struct npu, cdev);
	struct npu_client *client = kzalloc(sizeof(*client), GFP_KERNEL);

	if (!client)
		return -ENOMEM;
	mutex_lock(&npu->lock);
	if (npu->gone) {
		mutex_unlock(&npu->lock);
		kfree(client);
		return -ENODEV;
	}
	if (!npu->inode)
		npu->inode = igrab(inode);
	file->f_mapping = npu->inode->i_mapping;
	client->generation = npu->generation;
	mutex_unlock(&npu->lock);
	client->npu = npu;
	get_device(&npu->dev);
	file->private_data = client;
	return 0;
}

static int npu_release(struct inode *inode, struct file *file)
{
	struct npu_client *client = file->private_data;

	npu_free_windows_of(client);
	put_device(&client->npu->dev);
	kfree(client);
	return 0;
}

/* The first @want bytes of @size at @from, and zeros after them, as the caller asked. */
static long put_out(void __user *to, u32 want, const void *from, size_t size)
{
	if (clear_user(to, want) || copy_to_user(to, from, min_t(size_t, want, size)))
		return -EFAULT;
	return 0;
}

static long get_device_info(struct npu *npu, struct tt_get_device_info __user *arg)
{
	struct pci_dev *pdev = npu->pdev;
	struct tt_device_info info = {
		.output_size_bytes = sizeof(info),
		.vendor_id = pdev->vendor,
		.device_id = pdev->device,
		.subsystem_vendor_id = pdev->subsystem_vendor,
		.subsystem_id = pdev->subsystem_device,
		.bus_dev_fn = PCI_DEVID(pdev->bus->number, pdev->devfn),
		.max_dma_buf_size_log2 = 32,
		.pci_domain = pci_domain_nr(pdev->bus),
	};
	struct tt_output_size in;

	if (copy_from_user(&in, &arg->in, sizeof(in)))
		return -EFAULT;
	return put_out(&arg->out, in.output_size_bytes, &info, sizeof(info));
}

static long get_driver_info(struct tt_get_driver_info __user *arg)
{
	struct tt_driver_info info = {
		.output_size_bytes = sizeof(info),
		.driver_version = TT_ABI_VERSION,
		.major = 2,
		.minor = 10,
	};
	struct tt_output_size in;

	if (copy_from_user(&in, &arg->in, sizeof(in)))
		return -EFAULT;
	return put_out(&arg->out, in.output_size_bytes, &info, sizeof(info));
}

static void zap(struct npu *npu)
{
	if (npu->inode)
		unmap_mapping_range(npu->inode->i_mapping, 0, 0, 1);
}

/* All mappings go, and every file but the caller's is of no use from now on. */
static long reset(struct npu_client *client, struct tt_reset_device __user *arg)
{
	struct npu *npu = client->npu;
	struct tt_reset_device call;
	bool exported;

	if (copy_from_user(&call.in, &arg->in, sizeof(call.in)))
		return -EFAULT;
	mutex_lock(&npu->exports_lock);
	exported = !list_empty(&npu->exports);
	mutex_unlock(&npu->exports_lock);
	if (exported)
		return -EBUSY;
	mutex_lock(&npu->lock);
	client->generation = ++npu->generation;
	mutex_unlock(&npu->lock);
	zap(npu);
	memset(&call.out, 0, sizeof(call.out));
	call.out.output_size_bytes = sizeof(call.out);
	return put_out(&arg->out, call.in.output_size_bytes, &call.out, sizeof(call.out));
}

static long npu_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct npu_client *client = file->private_data;
	void __user *user = (void __user *)arg;
	int ret = check(client);

	if (ret)
		return ret;
	switch (cmd) {
	case TT_GET_DEVICE_INFO:
		return get_device_info(client->npu, user);
	case TT_GET_DRIVER_INFO:
		return get_driver_info(user);
	case TT_RESET_DEVICE:
		return reset(client, user);
	case TT_ALLOCATE_TLB:
		return npu_allocate_tlb(client, user);
	case TT_FREE_TLB:
		return npu_free_tlb(client, user);
	case TT_CONFIGURE_TLB:
		return npu_configure_tlb(client, user);
	case TT_EXPORT_TLB_DMABUF:
		return npu_export_tlb_dmabuf(client, user);
	default:
		return -EINVAL;
	}
}

static int npu_mmap_checked(struct file *file, struct vm_area_struct *vma)
{
	int ret = check(file->private_data);

	return ret ?: npu_mmap(file, vma);
}

static const struct file_operations npu_fops = {
	.owner = THIS_MODULE,
	.open = npu_open,
	.release = npu_release,
	.unlocked_ioctl = npu_ioctl,
	.mmap = npu_mmap_checked,
};

static void npu_free(struct device *dev)
{
	struct npu *npu = container_of(dev, struct npu, dev);

	iput(npu->inode);
	pci_dev_put(npu->pdev);
	ida_free(&minors, MINOR(dev->devt) - MINOR(first));
	kfree(npu);
}

struct npu *npu_create(struct pci_dev *pdev)
{
	struct npu *npu = kzalloc(sizeof(*npu), GFP_KERNEL);
	int ret;

	if (!npu)
		return ERR_PTR(-ENOMEM);
	ret = ida_alloc_max(&minors, MINORS - 1, GFP_KERNEL);
	if (ret < 0) {
		kfree(npu);
		return ERR_PTR(ret);
	}
	mutex_init(&npu->lock);
	mutex_init(&npu->exports_lock);
	INIT_LIST_HEAD(&npu->exports);
	npu->pdev = pci_dev_get(pdev);
	device_initialize(&npu->dev);
	npu->dev.class = &npu_class;
	npu->dev.parent = &pdev->dev;
	npu->dev.release = npu_free;
	npu->dev.devt = MKDEV(MAJOR(first), MINOR(first) + ret);
	ret = dev_set_name(&npu->dev, NAME "!%d", ret);
	if (ret)
		goto put;
	cdev_init(&npu->cdev, &npu_fops);
	npu->cdev.owner = THIS_MODULE;
	ret = cdev_device_add(&npu->cdev, &npu->dev);
	if (ret)
		goto put;
	return npu;

put:
	put_device(&npu->dev);
	return ERR_PTR(ret);
}

/* The function goes: no new file, no mapping, no export. What is still open holds the memory of @npu, nothing else. */
void npu_detach(struct npu *npu)
{
	cdev_device_del(&npu->cdev, &npu->dev);
	mutex_lock(&npu->lock);
	npu->gone = true;
	mutex_unlock(&npu->lock);
	zap(npu);
	npu_revoke_dmabufs(npu);
	put_device(&npu->dev);
}

int npu_chardev_init(void)
{
	int ret = class_register(&npu_class);

	if (ret)
		return ret;
	ret = alloc_chrdev_region(&first, 0, MINORS, NAME);
	if (ret)
		class_unregister(&npu_class);
	return ret;
}

void npu_chardev_exit(void)
{
	unregister_chrdev_region(first, MINORS);
	class_unregister(&npu_class);
	ida_destroy(&minors);
}
