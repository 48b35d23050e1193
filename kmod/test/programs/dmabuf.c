// SPDX-License-Identifier: GPL-2.0-only
/*
 * The other way to a window, a dma-buf: exported by the NPU's driver, refused by soft-RoCE, imported by the software HCA.
 * That is as far as a stock kernel goes without an HCA whose driver takes dma-bufs.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "abi.h"
#include "check.h"
#include "files.h"
#include "hca.h"
#include "npu.h"
#include "rdma.h"

#define DRIVER		"/sys/bus/pci/drivers/tenstorrent/"
#define SIZE		65536UL

static int export(const struct window *window, uint64_t offset, uint64_t size)
{
	struct tt_export_tlb_dmabuf call = {
		.argsz = sizeof(call), .tlb_id = window->id, .fd = -1, .offset = offset, .size = size,
	};

	return ioctl(window->device, TT_EXPORT_TLB_DMABUF, &call) ? -1 : call.fd;
}

static void check_refused(const char *name, int expected, int fd)
{
	check_error(name, expected, fd < 0 ? -1 : 0);
	if (fd >= 0)
		close(fd);
}

static void export_calls(int device)
{
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	struct window foreign = window;
	int fd = export(&window, 0, 0), other = npu_open();

	check_error("export of a whole window", 0, fd < 0 ? -1 : 0);
	check_number("its size", SMALL_WINDOW, lseek(fd, 0, SEEK_END));
	close(fd);
	check_refused("an offset that is not a page's", EINVAL, export(&window, 1, 0));
	check_refused("a size past the end", EINVAL, export(&window, SMALL_WINDOW - 4096, 8192));
	foreign.device = other;
	check_refused("somebody else's window", EPERM, export(&foreign, 0, 0));
	close(other);
	window_put(&window);
}

/* The kernel's method itself, since libibverbs refuses for this device before it asks the kernel. */
static int register_raw(struct rdma *rdma, int fd, uint64_t size)
{
	uint32_t lkey, rkey;
	struct {
		struct ib_uverbs_ioctl_hdr header;
		struct ib_uverbs_attr attributes[9];
	} call = {
		.header = {
			.length = sizeof(call), .object_id = UVERBS_OBJECT_MR, .method_id = UVERBS_METHOD_REG_DMABUF_MR,
			.num_attrs = 9, .driver_id = RDMA_DRIVER_RXE,
		},
		.attributes = {
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_HANDLE, .flags = UVERBS_ATTR_F_MANDATORY },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, .flags = UVERBS_ATTR_F_MANDATORY,
			  .data = rdma->pd->handle },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_OFFSET, .len = 8, .flags = UVERBS_ATTR_F_MANDATORY },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_LENGTH, .len = 8, .flags = UVERBS_ATTR_F_MANDATORY,
			  .data = size },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_IOVA, .len = 8, .flags = UVERBS_ATTR_F_MANDATORY },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_FD, .len = 4, .flags = UVERBS_ATTR_F_MANDATORY,
			  .data_s64 = fd },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, .len = 4,
			  .flags = UVERBS_ATTR_F_MANDATORY, .data = IBV_ACCESS_LOCAL_WRITE },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, .len = 4, .flags = UVERBS_ATTR_F_MANDATORY,
			  .data = (uintptr_t)&lkey },
			{ .attr_id = UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, .len = 4, .flags = UVERBS_ATTR_F_MANDATORY,
			  .data = (uintptr_t)&rkey },
		},
	};

	return ioctl(rdma->context->cmd_fd, RDMA_VERBS_IOCTL, &call);
}

static void where_soft_roce_ends(struct rdma *rdma, int device)
{
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	int fd = export(&window, 0, 0);
	struct ibv_mr *mr;

	errno = 0;
	mr = ibv_reg_dmabuf_mr(rdma->pd, 0, SMALL_WINDOW, 0, fd, IBV_ACCESS_LOCAL_WRITE);
	check_error("soft-RoCE's library takes no dma-buf", EOPNOTSUPP, mr ? 0 : -1);
	check_error("nor does its driver: the kernel, asked directly", EOPNOTSUPP,
		    register_raw(rdma, fd, SMALL_WINDOW));
	close(fd);
	window_put(&window);
}

static void imported(const struct options *options, int device)
{
	struct window window = window_get(device, SMALL_WINDOW, 3, 0), again;
	int fd = export(&window, 4096, SIZE), hca = hca_open();
	static uint8_t sent[SIZE], seen[SIZE];
	uint32_t id = window.id;

	check_error("import by the software HCA", 0, hca_import(hca, fd, 0));
	fill(sent, SIZE, 3);
	check_error("the HCA writes", 0, hca_write(hca, 0, sent, SIZE));
	check_error("not past the export's end", ERANGE, hca_write(hca, SIZE, sent, 1));
	window_map(&window, NULL);
	check(!memcmp(window.at + 4096, sent, SIZE), "the window shows it", "expected the pattern, got other bytes");
	if (options->bar) {
		read_host(options->bar, window.host + 4096, seen, SIZE);
		check_number("the host sees it", -1, first_difference(seen, SIZE, 3));
	}
	window_unmap(&window);
	check_error("FREE_TLB of an exported window", 0, window_free(&window));
	again = window_get(device, SMALL_WINDOW, 0, 0);
	check(again.id != id, "an exported window is not given away", "expected another window, got %u", again.id);
	window_put(&again);
	close(fd);
	close(hca);
	again = window_get(device, SMALL_WINDOW, 0, 0);
	check_number("when the last export is gone it is", id, again.id);
	window_put(&again);
}

/* The driver goes: the importer stops and gives the mapping back before unbinding returns. */
static void revoked(void)
{
	int device = npu_open(), hca = hca_open(), fd;
	struct window window = window_get(device, SMALL_WINDOW, 4, 0);
	struct hca_status first;
	char function[64];
	glob_t found;

	fd = export(&window, 0, 0);
	if (hca_import(hca, fd, 0) || hca_run(hca, 0) || !hca_is_running(hca))
		fail("let the software HCA write to an import");
	if (glob(DRIVER "*:*:*.*", 0, NULL, &found) || found.gl_pathc != 1)
		fail("find the function that the driver is bound to");
	snprintf(function, sizeof(function), "%s", strrchr(found.gl_pathv[0], '/') + 1);
	globfree(&found);
	if (write_text(DRIVER "unbind", function))
		fail("unbind %s", function);
	first = hca_status(hca);
	usleep(20000);
	check_number("unbinding revokes the export", 1, first.invalidated);
	check_number("and the HCA has stopped", first.accesses_when_stopped, hca_status(hca).accesses);
	check_number("and has no DMA mapping left", 0, first.mappings);
	close(hca);
	close(fd);
	close(device);
	if (write_text(DRIVER "bind", function))
		fail("bind %s", function);
}

int main(int count, char **arguments)
{
	struct options options = parse_options(count, arguments);
	struct rdma rdma = rdma_open(&options);
	int device = npu_open();

	export_calls(device);
	where_soft_roce_ends(&rdma, device);
	imported(&options, device);
	close(device);
	revoked();
	rdma_close(&rdma);
	return finish();
}
