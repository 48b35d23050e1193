// SPDX-License-Identifier: GPL-2.0-only
#include "rdma.h"

#include <string.h>
#include <time.h>

#define COMPLETION_S	60
#define ACCESS		(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	int i;

	for (i = 0; devices && devices[i]; i++)
		if (!strcmp(ibv_get_device_name(devices[i]), name))
			context = ibv_open_device(devices[i]);
	if (!context)
		fail("open RDMA device %s", name);
	ibv_free_device_list(devices);
	return context;
}

static struct ibv_qp *make_qp(struct rdma *rdma)
{
	struct ibv_qp_init_attr wanted = {
		.send_cq = rdma->cq,
		.recv_cq = rdma->cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(rdma->pd, &wanted);

	if (!qp)
		fail("create a queue pair");
	return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer, const union ibv_gid *gid, int index)
{
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	struct ibv_qp_attr receive = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.port_num = 1,
			.grh = { .dgid = *gid, .sgid_index = index, .hop_limit = 8 },
		},
	};
	struct ibv_qp_attr send = {
		.qp_state = IBV_QPS_RTS,
		.timeout = 16,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 4,
	};

	if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	    ibv_modify_qp(qp, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
	    ibv_modify_qp(qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail("connect a queue pair");
}

struct rdma rdma_open(const struct options *options)
{
	struct rdma rdma = { .context = open_device(options->device) };
	union ibv_gid gid;

	rdma.pd = ibv_alloc_pd(rdma.context);
	rdma.cq = ibv_create_cq(rdma.context, 64, NULL, NULL, 0);
	if (!rdma.pd || !rdma.cq || ibv_query_gid(rdma.context, 1, options->gid, &gid))
		fail("set up RDMA device %s", options->device);
	rdma.from = make_qp(&rdma);
	rdma.to = make_qp(&rdma);
	connect_qp(rdma.from, rdma.to->qp_num, &gid, options->gid);
	connect_qp(rdma.to, rdma.from->qp_num, &gid, options->gid);
	return rdma;
}

void rdma_close(struct rdma *rdma)
{
	ibv_destroy_qp(rdma->from);
	ibv_destroy_qp(rdma->to);
	ibv_destroy_cq(rdma->cq);
	if (ibv_dealloc_pd(rdma->pd) || ibv_close_device(rdma->context))
		fail("close the RDMA device");
}

struct ibv_mr *rdma_register(struct rdma *rdma, void *at, size_t size)
{
	return ibv_reg_mr(rdma->pd, at, size, ACCESS);
}

static int complete(struct rdma *rdma)
{
	time_t end = time(NULL) + COMPLETION_S;
	struct ibv_wc completion;
	int got;

	while ((got = ibv_poll_cq(rdma->cq, 1, &completion)) == 0)
		if (time(NULL) > end)
			return -1;
	return got < 0 ? -1 : (int)completion.status;
}

static int transfer(struct rdma *rdma, enum ibv_wr_opcode opcode, void *local, uint64_t remote, uint32_t rkey,
		    size_t size)
{
	struct ibv_mr *mr = rdma_register(rdma, local, size);
	struct ibv_send_wr request = { }, *bad;
	struct ibv_sge piece;
	int status = -1;

	if (!mr)
		return -1;
	piece = (struct ibv_sge){ .addr = (uintptr_t)local, .length = size, .lkey = mr->lkey };
	request.sg_list = &piece;
	request.num_sge = 1;
	request.opcode = opcode;
	request.send_flags = IBV_SEND_SIGNALED;
	request.wr.rdma.remote_addr = remote;
	request.wr.rdma.rkey = rkey;
	if (!ibv_post_send(rdma->from, &request, &bad))
		status = complete(rdma);
	ibv_dereg_mr(mr);
	return status;
}

int rdma_write(struct rdma *rdma, const void *from, void *to, uint32_t rkey, size_t size)
{
	return transfer(rdma, IBV_WR_RDMA_WRITE, (void *)from, (uintptr_t)to, rkey, size);
}

int rdma_read(struct rdma *rdma, void *to, const void *from, uint32_t rkey, size_t size)
{
	return transfer(rdma, IBV_WR_RDMA_READ, to, (uintptr_t)from, rkey, size);
}
