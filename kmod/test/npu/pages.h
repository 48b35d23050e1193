/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef HAWK_TEST_NPU_PAGES_H
#define HAWK_TEST_NPU_PAGES_H

#include <linux/types.h>

int npu_pages_add(phys_addr_t dram);
void npu_pages_remove(void);

#endif
