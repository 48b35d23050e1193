// SPDX-License-Identifier: GPL-2.0-only
/*
 * What becomes of a registration when its memory changes: each event that takes pages away invalidates it before it
 * returns, each that does not leaves it alone. The registrations are the software HCA's, which is seen to stop.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"
#include "check.h"
#include "files.h"
#include "hca.h"
#include "npu.h"

#define PAGE		4096UL
#define DRIVER		"/sys/bus/pci/drivers/tenstorrent/"

/* A registered window whose HCA is writing. */
struct scene {
	int device, hca;
	struct window window;
};

static struct scene scene_make(void)
{
	struct scene scene = { .device = npu_open(), .hca = hca_open() };

	scene.window = window_get(scene.device, SMALL_WINDOW, 2, 0);
	window_map(&scene.window, NULL);
	if (hca_register(scene.hca, scene.window.at, scene.window.size, 0) || hca_run(scene.hca, 0))
		fail("register a window with the software HCA");
	if (!hca_is_running(scene.hca))
		fail("the software HCA does not write");
	return scene;
}

/* What is still mapped would hold the file, and with it the chip's number when the driver is bound again. */
static void scene_end(struct scene *scene)
{
	if (scene->window.at)
		munmap(scene->window.at, scene->window.size);
	close(scene->hca);
	close(scene->device);
}

static void check_stopped(const struct scene *scene, const char *what)
{
	struct hca_status first = hca_status(scene->hca), later;
	char name[128];

	usleep(20000);
	later = hca_status(scene->hca);
	snprintf(name, sizeof(name), "%s: the registration is invalidated", what);
	check_number(name, 1, first.invalidated);
	snprintf(name, sizeof(name), "%s: the HCA has stopped", what);
	check_number(name, first.accesses_when_stopped, later.accesses);
	snprintf(name, sizeof(name), "%s: no DMA mapping is left", what);
	check_number(name, 0, first.mappings);
}

static void check_running(const struct scene *scene, const char *what)
{
	char name[128];

	snprintf(name, sizeof(name), "%s: the registration stays", what);
	check_number(name, 0, hca_status(scene->hca).invalidated);
	snprintf(name, sizeof(name), "%s: the HCA goes on", what);
	check(hca_is_running(scene->hca), name, "expected more writes, got none");
}

static void unmapped(void)
{
	struct scene scene = scene_make();

	window_unmap(&scene.window);
	check_stopped(&scene, "munmap");
	scene_end(&scene);
	check_nothing_left("munmap");
}

/* A window cannot be split, so this fails; a mapping of a whole BAR can. */
static void partly_unmapped(void)
{
	struct scene scene = scene_make();
	uint8_t *bar;
	int hca;

	check_error("partial munmap of a window is refused by the driver", EINVAL, munmap(scene.window.at, PAGE));
	check_running(&scene, "partial munmap of a window");
	bar = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, scene.device,
		   (off_t)TT_MMAP_BAR4_WC << TT_MMAP_KIND_SHIFT);
	hca = hca_open();
	if (bar == MAP_FAILED || hca_register(hca, bar, 16 * PAGE, 0) || hca_run(hca, 0))
		fail("register a mapping of the BAR");
	if (munmap(bar + 7 * PAGE, PAGE))
		fail("partial munmap");
	check_number("partial munmap of a BAR mapping: all of the registration is invalidated", 1,
		     hca_status(hca).invalidated);
	munmap(bar, 16 * PAGE);
	close(hca);
	scene_end(&scene);
	check_nothing_left("partial munmap");
}

static void neighbour_unmapped(void)
{
	struct scene scene = scene_make();
	struct window other = window_get(scene.device, SMALL_WINDOW, 3, 0);

	window_map(&other, NULL);
	window_put(&other);
	check_running(&scene, "munmap of another window");
	window_unmap(&scene.window);
	scene_end(&scene);
}

static void moved(void)
{
	struct scene scene = scene_make();
	uint8_t *to = reserve_addresses(SMALL_WINDOW);

	if (mremap(scene.window.at, scene.window.size, scene.window.size, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED)
		fail("mremap");
	check_stopped(&scene, "mremap");
	scene.window.at = to;
	scene_end(&scene);
	check_nothing_left("mremap");
}

static void protected(void)
{
	struct scene scene = scene_make();

	if (mprotect(scene.window.at, scene.window.size, PROT_READ))
		fail("mprotect");
	check_stopped(&scene, "mprotect");
	scene_end(&scene);
	check_nothing_left("mprotect");
}

/* FREE_TLB is refused while the window is mapped, and a mapping is all that the registration needs. */
static void freed(void)
{
	struct scene scene = scene_make();

	check_error("FREE_TLB of a mapped window", EBUSY, window_free(&scene.window));
	check_running(&scene, "FREE_TLB");
	window_unmap(&scene.window);
	check_stopped(&scene, "munmap, then FREE_TLB");
	check_error("FREE_TLB after munmap", 0, window_free(&scene.window));
	scene_end(&scene);
}

/* The client holds the file: the window stays allocated until the registration has ended, whoever closes what. */
static void closed(void)
{
	struct scene scene = scene_make();
	struct window again;
	int other = npu_open();

	window_unmap(&scene.window);
	close(scene.device);
	again = window_get(other, SMALL_WINDOW, 0, 0);
	check(again.id != scene.window.id, "a closed file's window is not given away while a registration holds it",
	      "expected another window, got %u", again.id);
	window_put(&again);
	close(scene.hca);
	usleep(100000);
	again = window_get(other, SMALL_WINDOW, 0, 0);
	check_number("after release it is", scene.window.id, again.id);
	window_put(&again);
	close(other);
	check_nothing_left("close");
}

/* The child has a copy of the mapping; the registration is the parent's. */
static void forked(void)
{
	struct scene scene = scene_make();
	pid_t child = fork();
	int status;

	if (!child) {
		scene.window.at[8] = 1;
		munmap(scene.window.at, scene.window.size);
		_exit(0);
	}
	waitpid(child, &status, 0);
	check_number("fork: the child ends well", 0, status);
	check_running(&scene, "fork, munmap and exit of the child");
	window_unmap(&scene.window);
	check_stopped(&scene, "munmap in the parent");
	scene_end(&scene);
	check_nothing_left("fork");
}

/* The HCA's file outlives the process that registered: it is inherited by the test. */
static void ended(bool by_exec)
{
	const char *what = by_exec ? "exec" : "exit";
	int hca = hca_open(), status;
	struct hca_status state;
	char name[128];
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child) {
		int device = npu_open();
		struct window window = window_get(device, SMALL_WINDOW, 2, 0);

		window_map(&window, NULL);
		if (hca_register(hca, window.at, window.size, 0) || hca_run(hca, 0) || !hca_is_running(hca))
			_exit(1);
		if (!by_exec)
			_exit(0);
		execl("/bin/true", "true", NULL);
		_exit(1);
	}
	waitpid(child, &status, 0);
	snprintf(name, sizeof(name), "%s: the process registered and ended well", what);
	check_number(name, 0, status);
	state = hca_status(hca);
	snprintf(name, sizeof(name), "%s: the registration is invalidated", what);
	check_number(name, 1, state.invalidated);
	snprintf(name, sizeof(name), "%s: no DMA mapping is left", what);
	check_number(name, 0, state.mappings);
	snprintf(name, sizeof(name), "%s: the region lives until the HCA lets go", what);
	check_number(name, 1, read_number(STATE "regions"));
	close(hca);
	check_nothing_left(what);
}

static void reset(void)
{
	struct tt_reset_device call = { .in = { .output_size_bytes = sizeof(call.out) } };
	struct scene scene = scene_make();
	int other = npu_open();

	check_error("RESET_DEVICE", 0, ioctl(other, TT_RESET_DEVICE, &call));
	check_stopped(&scene, "reset of the device");
	close(other);
	scene_end(&scene);
	check_nothing_left("a reset");
}

static void function_name(char *to, size_t size)
{
	glob_t found;

	if (glob(DRIVER "*:*:*.*", 0, NULL, &found) || found.gl_pathc != 1)
		fail("find the function that the driver is bound to");
	snprintf(to, size, "%s", strrchr(found.gl_pathv[0], '/') + 1);
	globfree(&found);
}

static void unbound(void)
{
	struct scene scene = scene_make();
	char function[64];

	function_name(function, sizeof(function));
	if (write_text(DRIVER "unbind", function))
		fail("unbind %s", function);
	check_stopped(&scene, "the driver is unbound");
	check_error("and its open files are of no use", ENODEV, window_free(&scene.window));
	scene_end(&scene);
	if (write_text(DRIVER "bind", function))
		fail("bind %s", function);
	check_nothing_left("unbinding");
}

/* hawk_peermem and the NPU's driver cannot be unloaded while a registration lives. */
static void unloaded(void)
{
	struct scene scene = scene_make();

	check_error("unloading hawk_peermem with a live registration is refused", EAGAIN,
		    syscall(SYS_delete_module, "hawk_peermem", O_NONBLOCK));
	check_error("unloading the NPU's driver with a live registration is refused", EAGAIN,
		    syscall(SYS_delete_module, "tenstorrent", O_NONBLOCK));
	check_running(&scene, "unloading");
	window_unmap(&scene.window);
	scene_end(&scene);
	check_nothing_left("unloading");
}

/* A core that does not know PEER_MEM_INVALIDATE_UNMAPS unmaps from within the invalidation. */
static void old_core(void)
{
	static const char expected[] = "acquire 1, get_pages 0, dma_map 0, invalidate mapped, dma_unmap, put_pages, release";
	struct scene scene;

	if (write_text(CORE_PARAMETER "ignore_flags", "1"))
		fail("make the core an old one");
	clear_events();
	scene = scene_make();
	window_unmap(&scene.window);
	check_stopped(&scene, "munmap, old core");
	scene_end(&scene);
	check(!strcmp(events(), expected), "munmap, old core: the order of calls", "expected \"%s\", got \"%s\"", expected,
	      events());
	if (write_text(CORE_PARAMETER "ignore_flags", "0"))
		fail("make the core a new one");
	check_nothing_left("munmap, old core");
}

int main(int count, char **arguments)
{
	parse_options(count, arguments);
	need_debugfs();
	unmapped();
	partly_unmapped();
	neighbour_unmapped();
	moved();
	protected();
	freed();
	closed();
	forked();
	ended(false);
	ended(true);
	reset();
	unbound();
	unloaded();
	old_core();
	return finish();
}
