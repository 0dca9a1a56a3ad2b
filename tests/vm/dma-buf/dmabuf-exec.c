// SPDX-License-Identifier: Apache-2.0
/*
 * usage: dmabuf-exec udmabuf|heap BYTES PROGRAM [ARGUMENT...]
 * Runs PROGRAM with a dma-buf of system memory as descriptor 'dma-buf' of
 * sd_listen_fds(3), and, where the memory is a memfd, that as 'memory'.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/dma-heap.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* SD_LISTEN_FDS_START */
enum { DMA_BUF = 3, MEMORY = 4 };

static int open_device(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);

	if (fd < 0)
		err(1, "%s", path);
	return fd;
}

/* Out of the way of the numbers that are to be taken. */
static int high(int fd)
{
	int moved = fcntl(fd, F_DUPFD_CLOEXEC, MEMORY + 1);

	if (fd < 0 || moved < 0)
		err(1, "descriptor");
	close(fd);
	return moved;
}

int main(int argc, char **argv)
{
	char pid[16];
	int memory = -1, dma_buf, is_udmabuf;
	size_t bytes;

	if (argc < 4)
		errx(1, "usage: dmabuf-exec udmabuf|heap BYTES PROGRAM [ARGUMENT...]");
	bytes = strtoull(argv[2], NULL, 10);
	is_udmabuf = !strcmp(argv[1], "udmabuf");
	if (is_udmabuf) {
		struct udmabuf_create create = { .size = bytes };

		memory = high(memfd_create("dmabuf-exec", MFD_ALLOW_SEALING));
		if (ftruncate(memory, bytes) || fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK))
			err(1, "memfd");
		create.memfd = memory;
		dma_buf = ioctl(open_device("/dev/udmabuf"), UDMABUF_CREATE, &create);
	} else {
		struct dma_heap_allocation_data heap = { .len = bytes, .fd_flags = O_RDWR };

		dma_buf = ioctl(open_device("/dev/dma_heap/system"), DMA_HEAP_IOCTL_ALLOC, &heap);
		if (!dma_buf)
			dma_buf = heap.fd;
	}
	dma_buf = high(dma_buf);
	if (dup2(dma_buf, DMA_BUF) < 0 || (is_udmabuf && dup2(memory, MEMORY) < 0))
		err(1, "dup2");
	snprintf(pid, sizeof(pid), "%d", getpid());
	setenv("LISTEN_PID", pid, 1);
	setenv("LISTEN_FDS", is_udmabuf ? "2" : "1", 1);
	setenv("LISTEN_FDNAMES", is_udmabuf ? "dma-buf:memory" : "dma-buf", 1);
	execv(argv[3], argv + 3);
	err(1, "%s", argv[3]);
}
