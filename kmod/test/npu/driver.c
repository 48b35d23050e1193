// SPDX-License-Identifier: GPL-2.0-only
/*
 * A stand-in for tt-kmd: binds to the function that bus.c makes and speaks the part of tt-kmd's ABI that windows need
 * (abi.h). It is named after the driver that it stands for, since hawk_peermem knows a driver by its module's name.
 * Test code: never installed.
 */
#include <linux/module.h>

#include "npu.h"

static int npu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct npu *npu;
	int ret;

	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	if (pci_resource_len(pdev, 4) != NPU_BAR4_SIZE)
		return dev_err_probe(&pdev->dev, -ENXIO, "this drives the stand-in only, whose BAR 4 has %llu bytes\n",
				     (u64)NPU_BAR4_SIZE);
	npu = npu_create(pdev);
	if (IS_ERR(npu))
		return PTR_ERR(npu);
	pci_set_drvdata(pdev, npu);
	return 0;
}

static void npu_remove(struct pci_dev *pdev)
{
	npu_detach(pci_get_drvdata(pdev));
}

static const struct pci_device_id npu_ids[] = {
	{ PCI_DEVICE(NPU_VENDOR_ID, NPU_DEVICE_ID) },
	{ }
};
MODULE_DEVICE_TABLE(pci, npu_ids);

static struct pci_driver npu_driver = {
	.name = "tenstorrent",
	.id_table = npu_ids,
	.probe = npu_probe,
	.remove = npu_remove,
};

static int __init npu_init(void)
{
	int ret = npu_chardev_init();

	if (ret)
		return ret;
	ret = pci_register_driver(&npu_driver);
	if (ret)
		npu_chardev_exit();
	return ret;
}

static void __exit npu_exit(void)
{
	pci_unregister_driver(&npu_driver);
	npu_chardev_exit();
}

module_init(npu_init);
module_exit(npu_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION("2.10.0");
MODULE_DESCRIPTION("Test only: a stand-in for tt-kmd");
