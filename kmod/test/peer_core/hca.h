/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef HAWK_TEST_HCA_H
#define HAWK_TEST_HCA_H

#include <linux/types.h>

struct device;

/* hca_device.c: the HCA as a device with DMA addresses of its own. */
int hca_device_init(void);
void hca_device_exit(void);
struct device *hca_device(void);
unsigned int hca_device_mappings(void);
phys_addr_t hca_device_resolve(dma_addr_t address);

#endif
