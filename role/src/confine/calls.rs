//! The system calls that none of our confined programs needs. A list of refusals: what is not named here works as before, in this libc and the
//! next.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that the libc crate does not name for every architecture.
const FCHMODAT2: i64 = 452;
const KEXEC_FILE_LOAD: i64 = if cfg!(target_arch = "x86_64") { 320 } else { 294 };

/// From here on a number is a call of x32: on x86_64 the same calls by other numbers, for 32-bit pointers, where a kernel lets them be.
const X32: u32 = 0x4000_0000;

/// Other programs, and other processes: their memory, their descriptors.
const PROCESSES: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_personality,
    libc::SYS_shmget,
    libc::SYS_msgget,
    libc::SYS_semget,
];

/// Another view of the file system, or of the machine.
const NAMESPACES: &[i64] = &[
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

/// Parts of the kernel that are rarely asked, and where its own faults are often found.
const KERNEL: &[i64] = &[
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    KEXEC_FILE_LOAD,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_vhangup,
    libc::SYS_vmsplice,
    libc::SYS_fanotify_init,
    libc::SYS_memfd_secret,
];

/// Signals to others. `tkill` is musl's way to end itself, and cannot tell a thread of its own from another's.
const SIGNALS: &[i64] = &[
    libc::SYS_kill,
    #[cfg(not(target_env = "musl"))]
    libc::SYS_tkill,
    libc::SYS_pidfd_send_signal,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
];

/// What makes or changes files by their name, or without any, of a process that has nothing to write. Where one has, Landlock bounds it.
const FILES: &[i64] = &[
    libc::SYS_memfd_create,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_truncate,
];

/// What Landlock does not see: owners, modes, times, attributes.
const ATTRIBUTES: &[i64] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
];

/// The older forms of the same, which newer architectures never had.
#[cfg(target_arch = "x86_64")]
const OLDER_FILES: &[i64] = &[
    libc::SYS_creat,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_mknod,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_unlink,
    libc::SYS_rename,
];
#[cfg(target_arch = "x86_64")]
const OLDER: &[i64] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_uselib,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_FILES: &[i64] = &[];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[i64] = &[];

/// Their arguments lie in memory, where no filter can look; callers fall back to `clone` and `openat`, whose arguments it sees.
const UNREADABLE: &[i64] = &[libc::SYS_clone3, libc::SYS_openat2];

/// The filters of a process that writes files or does not, to be applied one after the other; the kernel takes the strictest answer of all.
pub fn filters(writes: bool) -> Result<Vec<BpfProgram>, BackendError> {
    let lists = [PROCESSES, SIGNALS, NAMESPACES, KERNEL, ATTRIBUTES, OLDER];
    let mut refused: Rules = lists.concat().into_iter().map(always).collect();
    refused.insert(libc::SYS_clone, vec![all(vec![masked(0, libc::CLONE_THREAD, 0)?])?]);
    refused.insert(libc::SYS_tgkill, others()?);
    refused.insert(libc::SYS_socket, families()?);
    if !writes {
        refused.extend([FILES, OLDER_FILES].concat().into_iter().map(always));
        refused.insert(libc::SYS_openat, writing(2)?);
        #[cfg(target_arch = "x86_64")]
        refused.insert(libc::SYS_open, writing(1)?);
    }
    let unreadable = UNREADABLE.iter().copied().map(always).collect();
    Ok(vec![program(refused, libc::EPERM)?, program(unreadable, libc::ENOSYS)?])
}

/// Whatever the arguments.
fn always(call: i64) -> (i64, Vec<SeccompRule>) {
    (call, Vec::new())
}

/// An `open` that could write, `flags` being the place of its flags among the arguments.
fn writing(flags: u8) -> Result<Vec<SeccompRule>, BackendError> {
    let (mode, made, cut) = (libc::O_ACCMODE, libc::O_CREAT, libc::O_TRUNC);
    let ways = [(mode, libc::O_WRONLY), (mode, libc::O_RDWR), (made, made), (cut, cut)];
    ways.into_iter().map(|(mask, value)| all(vec![masked(flags, mask, value)?])).collect()
}

/// Any process but this one: it ends itself by a signal when it aborts.
fn others() -> Result<Vec<SeccompRule>, BackendError> {
    let own = std::process::id().into();
    Ok(vec![all(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, own)?])?])
}

/// Sockets of all families but unix, IPv4 and IPv6, and netlink, which resolvers ask for the addresses of this machine.
fn families() -> Result<Vec<SeccompRule>, BackendError> {
    let is = |op, family: i32| SeccompCondition::new(0, SeccompCmpArgLen::Dword, op, family as u64);
    Ok(vec![
        all(vec![is(SeccompCmpOp::Gt, libc::AF_INET)?, is(SeccompCmpOp::Lt, libc::AF_INET6)?])?,
        all(vec![is(SeccompCmpOp::Gt, libc::AF_INET6)?, is(SeccompCmpOp::Ne, libc::AF_NETLINK)?])?,
    ])
}

/// Of the argument at `place`, the bits of `mask` are those of `value`.
fn masked(place: u8, mask: i32, value: i32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(place, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask as u64), value as u64)
}

/// Where all of them are met.
fn all(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions)
}

fn program(rules: Rules, errno: i32) -> Result<BpfProgram, BackendError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let refusal = SeccompAction::Errno(errno.unsigned_abs());
    let mut program: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, refusal, architecture)?.try_into()?;
    if cfg!(target_arch = "x86_64") {
        program.splice(ARCHITECTURE_ASKED..ARCHITECTURE_ASKED, without_x32());
    }
    Ok(program)
}

/// A program of seccompiler's begins with so many instructions, which end a process of another architecture.
const ARCHITECTURE_ASKED: usize = 3;

/// Refuses calls of x32, as a kernel without them does; goes on with what comes behind for all others.
fn without_x32() -> [sock_filter; 3] {
    let load_number = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let at_least = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    [
        sock_filter { code: load_number, jt: 0, jf: 0, k: 0 },
        sock_filter { code: at_least, jt: 0, jf: 1, k: X32 },
        sock_filter { code: answer, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs() },
    ]
}
