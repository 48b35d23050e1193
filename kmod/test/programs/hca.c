// SPDX-License-Identifier: GPL-2.0-only
#include "hca.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "check.h"

#define WAIT_MS		5000

int hca_open(void)
{
	int hca = open("/dev/hawk_soft_hca", O_RDWR | O_CLOEXEC);

	if (hca < 0)
		fail("open the software HCA");
	return hca;
}

int hca_register(int hca, const void *at, size_t size, uint32_t flags)
{
	struct hca_register call = { .address = (uintptr_t)at, .size = size, .flags = flags };

	return ioctl(hca, HCA_REGISTER, &call);
}

int hca_import(int hca, int dmabuf, uint32_t flags)
{
	struct hca_import call = { .fd = dmabuf, .flags = flags };

	return ioctl(hca, HCA_IMPORT, &call);
}

static int copy(int hca, uint64_t offset, const void *buffer, size_t size, bool to_device)
{
	struct hca_copy call = { .offset = offset, .size = size, .buffer = (uintptr_t)buffer, .to_device = to_device };

	return ioctl(hca, HCA_COPY, &call);
}

int hca_write(int hca, uint64_t offset, const void *from, size_t size)
{
	return copy(hca, offset, from, size, true);
}

int hca_read(int hca, uint64_t offset, void *to, size_t size)
{
	return copy(hca, offset, to, size, false);
}

int hca_run(int hca, uint64_t offset)
{
	struct hca_run call = { .offset = offset };

	return ioctl(hca, HCA_RUN, &call);
}

struct hca_status hca_status(int hca)
{
	struct hca_status status;

	if (ioctl(hca, HCA_STATUS, &status))
		fail("ask the software HCA");
	return status;
}

bool hca_is_running(int hca)
{
	uint64_t before = hca_status(hca).accesses;
	int waited;

	for (waited = 0; waited < WAIT_MS; waited++) {
		if (hca_status(hca).accesses > before + 2)
			return true;
		usleep(1000);
	}
	return false;
}
