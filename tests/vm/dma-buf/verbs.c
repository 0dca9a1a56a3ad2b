// SPDX-License-Identifier: Apache-2.0
/*
 * A libibverbs.so.1 in front of the real one: its ibv_reg_dmabuf_mr asks the
 * kernel. librxe has none, so that libibverbs refuses without asking.
 * The real library is named by its path as one that this one needs, where all
 * other functions are found.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdlib.h>
#include <sys/ioctl.h>

/* The provider, which frees it, has a larger structure that begins with it. */
struct provider_mr {
	struct ibv_mr mr;
	char rest[256];
};

#define IN(id, size, value) \
	{ .attr_id = (id), .len = (size), .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)(value) }

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	struct provider_mr *made = calloc(1, sizeof(*made));
	struct {
		struct ib_uverbs_ioctl_hdr header;
		struct ib_uverbs_attr attrs[9];
	} call = {
		.header = {
			.length = sizeof(call),
			.object_id = UVERBS_OBJECT_MR,
			.method_id = UVERBS_METHOD_REG_DMABUF_MR,
			.num_attrs = 9,
			.driver_id = RDMA_DRIVER_RXE,
		},
		.attrs = {
			IN(UVERBS_ATTR_REG_DMABUF_MR_HANDLE, 0, 0),
			IN(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, 0, pd->handle),
			IN(UVERBS_ATTR_REG_DMABUF_MR_OFFSET, 8, offset),
			IN(UVERBS_ATTR_REG_DMABUF_MR_LENGTH, 8, length),
			IN(UVERBS_ATTR_REG_DMABUF_MR_IOVA, 8, iova),
			IN(UVERBS_ATTR_REG_DMABUF_MR_FD, 4, fd),
			IN(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 4, access),
			IN(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, 4, made ? &made->mr.lkey : NULL),
			IN(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, 4, made ? &made->mr.rkey : NULL),
		},
	};

	if (!made)
		return NULL;
	if (ioctl(pd->context->cmd_fd, RDMA_VERBS_IOCTL, &call)) {
		int failed = errno;

		free(made);
		errno = failed;
		return NULL;
	}
	made->mr.handle = (uint32_t)call.attrs[0].data;
	made->mr.context = pd->context;
	made->mr.pd = pd;
	made->mr.length = length;
	return &made->mr;
}
