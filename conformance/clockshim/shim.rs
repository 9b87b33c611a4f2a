//! Steps the wall clock of the program that it is loaded into (`LD_PRELOAD`), and nothing else: timers and the clock since boot
//! go on as they are. By how much stands in a file of eight bytes that a test writes and this reads at every look.
//!
//! The build script of `lockcore-conformance` compiles this file for the machine that it builds for.

use std::{
    ffi::{CStr, c_char, c_int, c_long, c_void},
    ptr,
    sync::atomic::{AtomicI64, AtomicPtr, Ordering},
};

#[cfg(target_arch = "x86_64")]
const CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const CLOCK_GETTIME: c_long = 113;

/// Names the file.
const VARIABLE: &CStr = c"LOCK_CLOCK_SHIM_OFFSET";

const REALTIME: c_int = 0;
const REALTIME_COARSE: c_int = 5;

#[repr(C)]
pub struct Time {
    seconds: i64,
    /// Nanoseconds, or microseconds, by the call.
    rest: i64,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn close(file: c_int) -> c_int;
    fn mmap(
        at: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
}

/// What is read where there is no file.
static NO_STEP: AtomicI64 = AtomicI64::new(0);

/// Where the file is in memory, once somebody has looked.
static STEP: AtomicPtr<AtomicI64> = AtomicPtr::new(ptr::null_mut());

fn step() -> i64 {
    let mut at = STEP.load(Ordering::Acquire);
    if at.is_null() {
        // Two threads may both look for it; both find the same bytes.
        at = find();
        STEP.store(at, Ordering::Release);
    }
    unsafe { (*at).load(Ordering::Relaxed) }
}

fn find() -> *mut AtomicI64 {
    const READ_CLOSE_ON_EXEC: c_int = 0o2_000_000;
    const READ: c_int = 1;
    const SHARED: c_int = 1;
    let nothing = (&raw const NO_STEP).cast_mut();
    unsafe {
        let path = getenv(VARIABLE.as_ptr());
        if path.is_null() {
            return nothing;
        }
        let file = open(path, READ_CLOSE_ON_EXEC);
        if file < 0 {
            return nothing;
        }
        let at = mmap(ptr::null_mut(), size_of::<i64>(), READ, SHARED, file, 0);
        close(file);
        if at as isize == -1 { nothing } else { at.cast() }
    }
}

/// Reads a clock of the system itself.
unsafe fn read(clock: c_int, time: *mut Time) -> c_int {
    unsafe { syscall(CLOCK_GETTIME, clock, time) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Time) -> c_int {
    unsafe {
        let answer = read(clock, time);
        if answer == 0 && (clock == REALTIME || clock == REALTIME_COARSE) {
            (*time).seconds += step();
        }
        answer
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut Time, _zone: *mut c_void) -> c_int {
    unsafe {
        let answer = read(REALTIME, time);
        if answer == 0 {
            (*time).seconds += step();
            (*time).rest /= 1000;
        }
        answer
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(to: *mut i64) -> i64 {
    let mut now = Time { seconds: 0, rest: 0 };
    unsafe {
        read(REALTIME, &raw mut now);
        let seconds = now.seconds + step();
        if !to.is_null() {
            *to = seconds;
        }
        seconds
    }
}
