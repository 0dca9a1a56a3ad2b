//! Layouts and numbers of this crate against the bindings that cudarc generates from cuda.h. The crate itself has its own, so
//! that clients are not built with all of them.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys;

use crate::table::{AccessDescriptor, Address, AllocationHandle, AllocationProperties, Device, Location};
use crate::{allocation, bounce, gpu, mapping};

#[test]
fn structures_have_the_layout_of_cuda_h() {
    let sizes = |ours: (usize, usize), theirs: (usize, usize), name| assert_eq!(ours, theirs, "{name}");
    macro_rules! of {
        ($ours:ty, $theirs:ty) => {
            sizes(
                (size_of::<$ours>(), align_of::<$ours>()),
                (size_of::<$theirs>(), align_of::<$theirs>()),
                stringify!($theirs),
            )
        };
    }
    of!(Location, sys::CUmemLocation);
    of!(AccessDescriptor, sys::CUmemAccessDesc);
    of!(AllocationProperties, sys::CUmemAllocationProp);
    of!(Address, sys::CUdeviceptr);
    of!(AllocationHandle, sys::CUmemGenericAllocationHandle);
    of!(Device, sys::CUdevice);
    of!([u8; 16], [u8; size_of::<sys::CUuuid>()]);
    macro_rules! offsets {
        ($ours:ty, $theirs:ty { $($own:ident = $($field:ident).+;)* }) => {
            $(assert_eq!(offset_of!($ours, $own), offset_of!($theirs, $($field).+), stringify!($own));)*
        };
    }
    offsets!(Location, sys::CUmemLocation { kind = type_; id = id; });
    offsets!(AccessDescriptor, sys::CUmemAccessDesc { location = location; flags = flags; });
    offsets!(AllocationProperties, sys::CUmemAllocationProp {
        kind = type_;
        handle_types = requestedHandleTypes;
        location = location;
        windows_metadata = win32HandleMetaData;
        compression = allocFlags.compressionType;
        rdma_capable = allocFlags.gpuDirectRDMACapable;
        usage = allocFlags.usage;
        reserved = allocFlags.reserved;
    });
}

#[test]
fn numbers_are_those_of_cuda_h() {
    let numbers = [
        (mapping::LOCATION_DEVICE, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32),
        (mapping::ALLOCATION_PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
        (mapping::READ_WRITE, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32),
        (mapping::POSIX_FILE_DESCRIPTOR, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0),
        (gpu::DMA_BUF_FD, sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32),
        (
            gpu::HOST_PAGE_TABLES,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES as u32,
        ),
        (
            u32::try_from(gpu::MAPPING_TYPE_PCIE).expect("a flag"),
            sys::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u32,
        ),
        (gpu::DEVICE_ORDINAL, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32),
        (gpu::CTX_SYNC_MEMOPS, sys::CUctx_flags::CU_CTX_SYNC_MEMOPS as u32),
        (
            gpu::EVENT_FLAGS,
            sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32,
        ),
        (allocation::BUFFER_ID, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32),
        (bounce::PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE),
    ];
    for (at, (ours, theirs)) in numbers.into_iter().enumerate() {
        assert_eq!(ours, theirs, "number {at}");
    }
}
