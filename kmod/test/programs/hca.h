/* SPDX-License-Identifier: GPL-2.0-only */
/* The software HCA of the stand-in core. */
#ifndef HCA_H
#define HCA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hca_abi.h"

int hca_open(void);
/* These return 0, or -1 with errno. */
int hca_register(int hca, const void *at, size_t size, uint32_t flags);
int hca_import(int hca, int dmabuf, uint32_t flags);
int hca_write(int hca, uint64_t offset, const void *from, size_t size);
int hca_read(int hca, uint64_t offset, void *to, size_t size);
int hca_run(int hca, uint64_t offset);
struct hca_status hca_status(int hca);
/* Waits until the HCA has written a few times more; false after some seconds. */
bool hca_is_running(int hca);

#endif
