/* SPDX-License-Identifier: GPL-2.0-only */
/* Real verbs: one device, two queue pairs that are connected with each other. */
#ifndef RDMA_H
#define RDMA_H

#include <infiniband/verbs.h>
#include <stdbool.h>

#include "check.h"

struct rdma {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *from, *to;
};

struct rdma rdma_open(const struct options *options);
void rdma_close(struct rdma *rdma);

/* A registration for remote reads and writes; NULL with errno. */
struct ibv_mr *rdma_register(struct rdma *rdma, void *at, size_t size);

/*
 * One RDMA write or read between local memory and a registered address. Returns ibv_wc_status, or -1 where the work
 * request cannot be posted or does not complete.
 */
int rdma_write(struct rdma *rdma, const void *from, void *to, uint32_t rkey, size_t size);
int rdma_read(struct rdma *rdma, void *to, const void *from, uint32_t rkey, size_t size);

#endif
