//! Bulk moves over memory that other processes may write meanwhile.
//!
//! Why not `ptr::copy`: it promises the compiler that nobody else writes, and a peer can break any
//! promise about shared memory. On x86-64 the moves are string instructions in inline assembly:
//! opaque to the compiler, one pass over the source, at the speed of the C library's memcpy
//! (Intel SDM vol. 1, 7.3.9.3 "Fast-String Operation"). Elsewhere, and for short aligned ranges,
//! they are volatile word by word, each source byte read exactly once. Under a concurrent writer
//! the copy is a mix of old and new bytes, torn anywhere: callers copy first and check the copy.

use std::mem::size_of;

const WORD_BYTES: usize = size_of::<u64>();
/// Up to here words are no slower than the start-up of a string instruction (measured on a Rocket Lake with FSRM).
const SHORT_BYTES: usize = 128;

/// Copies `len` bytes from `src` to `dst`, front to back.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes for the whole call. Both may be
/// written by others at the same time only if they lie outside of every Rust allocation (a
/// mapping); a side that is Rust memory is the caller's alone. If they overlap, `dst` is below
/// `src`.
pub(crate) unsafe fn copy_forward(src: *const u8, dst: *mut u8, len: usize) {
    let aligned = (src.addr() | dst.addr() | len).is_multiple_of(WORD_BYTES);
    if aligned && (len <= SHORT_BYTES || !HAS_STRING_MOVES) {
        // SAFETY: readable and writable for `len` by our caller's contract; both are aligned for
        // u64 and `len` is a multiple of it, checked above.
        unsafe { copy_words(src.cast(), dst.cast(), len / WORD_BYTES) }
    } else {
        // SAFETY: our caller's contract is this function's contract.
        unsafe { copy_bytes(src, dst, len) }
    }
}

/// Sets `len` bytes at `dst` to zero.
///
/// # Safety
/// As the `dst` of [`copy_forward`].
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    // SAFETY: our caller's contract is this function's contract.
    unsafe { fill_zero(dst, len) }
}

/// # Safety
/// As [`copy_forward`], with `count` words; both pointers aligned for u64.
unsafe fn copy_words(src: *const u64, dst: *mut u64, count: usize) {
    for index in 0..count {
        // SAFETY: index < count, so the word lies in the readable range; aligned by contract.
        let word = unsafe { src.wrapping_add(index).read_volatile() };
        // SAFETY: index < count, so the word lies in the writable range; aligned by contract.
        unsafe { dst.wrapping_add(index).write_volatile(word) };
    }
}

#[cfg(target_arch = "x86_64")]
const HAS_STRING_MOVES: bool = true;
#[cfg(not(target_arch = "x86_64"))]
const HAS_STRING_MOVES: bool = false;

/// # Safety
/// As [`copy_forward`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_bytes(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: reads [src, src+len) and writes [dst, dst+len), which our caller vouches for; the
    // direction flag is clear on entry of an asm block (Rust reference, "Rules for inline
    // assembly"), and rep movsb touches neither stack nor flags.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// As the `dst` of [`copy_forward`].
#[cfg(target_arch = "x86_64")]
unsafe fn fill_zero(dst: *mut u8, len: usize) {
    // SAFETY: writes [dst, dst+len), which our caller vouches for; direction flag clear as above,
    // and rep stosb touches neither stack nor flags.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") dst => _,
            in("al") 0_u8,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// As [`copy_forward`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_bytes(src: *const u8, dst: *mut u8, len: usize) {
    let head = match src.addr() % WORD_BYTES == dst.addr() % WORD_BYTES {
        true => (src.addr().wrapping_neg() % WORD_BYTES).min(len),
        false => len,
    };
    let words = (len - head) / WORD_BYTES;
    let tail = head + words * WORD_BYTES;
    // SAFETY: [0, head) lies in the ranges of our caller's contract.
    unsafe { copy_each_byte(src, dst, head) };
    // SAFETY: [head, tail) lies in those ranges; `head` aligns both pointers, or `words` is 0.
    unsafe { copy_words(src.wrapping_add(head).cast(), dst.wrapping_add(head).cast(), words) };
    // SAFETY: [tail, len) lies in those ranges.
    unsafe { copy_each_byte(src.wrapping_add(tail), dst.wrapping_add(tail), len - tail) };
}

/// # Safety
/// As [`copy_forward`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_each_byte(src: *const u8, dst: *mut u8, len: usize) {
    for index in 0..len {
        // SAFETY: index < len, so the byte is readable by contract.
        let byte = unsafe { src.wrapping_add(index).read_volatile() };
        // SAFETY: index < len, so the byte is writable by contract.
        unsafe { dst.wrapping_add(index).write_volatile(byte) };
    }
}

/// # Safety
/// As the `dst` of [`copy_forward`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn fill_zero(dst: *mut u8, len: usize) {
    let head = (dst.addr().wrapping_neg() % WORD_BYTES).min(len);
    let words = (len - head) / WORD_BYTES;
    let tail = head + words * WORD_BYTES;
    for index in (0..head).chain(tail..len) {
        // SAFETY: index < len, so the byte is writable by contract.
        unsafe { dst.wrapping_add(index).write_volatile(0) };
    }
    let base: *mut u64 = dst.wrapping_add(head).cast();
    for index in 0..words {
        // SAFETY: the word lies before `tail`, in the writable range; `head` aligned it.
        unsafe { base.wrapping_add(index).write_volatile(0) };
    }
}
