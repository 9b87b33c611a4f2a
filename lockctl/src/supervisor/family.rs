//! Which processes are below us: whoever the command started, wherever it went.

use std::{collections::HashMap, collections::HashSet};

use rustix::process::{Pid, Signal};

/// One process, as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    parent: i32,
    group: i32,
    /// In ticks since boot: with the pid it names a process for good.
    started: u64,
    is_zombie: bool,
}

/// The processes below this one that a run has to answer for.
#[derive(Debug, Default)]
pub(super) struct Family {
    /// Children that were there before the command: of a shell that replaced itself with us.
    strangers: HashSet<(i32, u64)>,
}

/// A living process below us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) pid: i32,
    pub(super) group: i32,
    started: u64,
}

impl Family {
    /// Takes note of the children that are not the command's.
    pub(super) fn before_the_command() -> Self {
        let table = read_table();
        let own = own_pid();
        let strangers = table
            .iter()
            .filter(|(_, entry)| entry.parent == own)
            .map(|(pid, entry)| (*pid, entry.started))
            .collect();
        Self { strangers }
    }

    /// Says whether there were children before the command, so that "no child is left" is not to be waited for.
    pub(super) fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// Lists the living processes below us, parents before children.
    pub(super) fn members(&self) -> Vec<Member> {
        descend(&read_table(), own_pid(), &self.strangers)
    }

    /// Sends a signal to the command's group, then to every process below us that is in another one.
    ///
    /// The group's number can only have been given to somebody else once its last member is gone, so it is used only
    /// while a member of the family is seen in it, or while `leader_stands`.
    pub(super) fn signal(&self, group: Pid, leader_stands: bool, signal: Signal) {
        let members = self.members();
        let number = group.as_raw_nonzero().get();
        signal_group(&members, group, leader_stands, signal);
        for member in members.iter().filter(|m| m.group != number) {
            signal_one(member, signal);
        }
    }

    /// Sends a signal to the command's group alone.
    pub(super) fn signal_group(&self, group: Pid, leader_stands: bool, signal: Signal) {
        signal_group(&self.members(), group, leader_stands, signal);
    }
}

fn signal_group(members: &[Member], group: Pid, leader_stands: bool, signal: Signal) {
    let number = group.as_raw_nonzero().get();
    if leader_stands || members.iter().any(|m| m.group == number) {
        // Nobody left to signal is what was wanted.
        let _ = rustix::process::kill_process_group(group, signal);
    }
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn descend(table: &HashMap<i32, Entry>, root: i32, strangers: &HashSet<(i32, u64)>) -> Vec<Member> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (pid, entry) in table {
        children.entry(entry.parent).or_default().push(*pid);
    }
    let (mut members, mut seen, mut next) = (Vec::new(), HashSet::from([root]), vec![root]);
    while let Some(parent) = next.pop() {
        for pid in children.get(&parent).into_iter().flatten() {
            let entry = table[pid];
            if strangers.contains(&(*pid, entry.started)) || !seen.insert(*pid) {
                continue;
            }
            next.push(*pid);
            if !entry.is_zombie {
                members.push(Member { pid: *pid, group: entry.group, started: entry.started });
            }
        }
    }
    members
}

/// Signals a process, and nobody who got its number in the meantime.
#[cfg(target_os = "linux")]
fn signal_one(member: &Member, signal: Signal) {
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

    let Some(pid) = Pid::from_raw(member.pid) else { return };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => {
            if read_entry(member.pid).is_some_and(|entry| entry.started == member.started) {
                let _ = pidfd_send_signal(handle, signal);
            }
        }
        // Before Linux 5.3, or where a filter forbids it.
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
            let _ = rustix::process::kill_process(pid, signal);
        }
        Err(_) => {}
    }
}

#[cfg(not(target_os = "linux"))]
fn signal_one(_member: &Member, _signal: Signal) {}

/// Returns the parent of a process.
pub(super) fn parent_of(pid: Pid) -> Option<Pid> {
    Pid::from_raw(read_entry(pid.as_raw_nonzero().get())?.parent)
}

/// Reads the table of processes; empty where there is no `/proc`.
fn read_table() -> HashMap<i32, Entry> {
    let Ok(directory) = std::fs::read_dir("/proc") else { return HashMap::new() };
    directory
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| Some((pid, read_entry(pid)?)))
        .collect()
}

fn read_entry(pid: i32) -> Option<Entry> {
    // Names may hold any byte, so the line need not be text.
    let line = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_entry(&String::from_utf8_lossy(&line))
}

/// Reads a line of `/proc/PID/stat`: everything after the last `)`, because a name may hold one.
fn parse_entry(line: &str) -> Option<Entry> {
    let (_, rest) = line.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Entry {
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(parent: i32, started: u64) -> Entry {
        Entry { parent, group: 10, started, is_zombie: false }
    }

    #[test]
    fn a_name_with_a_parenthesis_and_spaces_is_no_trouble() {
        let line = "42 (a) b (c)) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987 1 1";
        assert_eq!(parse_entry(line), Some(Entry { parent: 7, group: 42, started: 987, is_zombie: false }));
        assert_eq!(parse_entry("42 (cut"), None);
        assert_eq!(parse_entry("42 (cut) S 7"), None);
    }

    #[test]
    fn strangers_and_their_children_are_left_alone() {
        let table = HashMap::from([
            (10, entry(1, 5)),
            (11, entry(10, 6)),
            (12, entry(11, 7)),
            (20, entry(1, 5)),
            (21, entry(20, 6)),
            (30, entry(99, 1)),
        ]);
        let mut found: Vec<i32> =
            descend(&table, 1, &HashSet::from([(20, 5)])).iter().map(|m| m.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12]);
        // The number of a stranger, given to somebody else.
        assert_eq!(descend(&table, 1, &HashSet::from([(20, 4)])).len(), 5);
    }

    #[test]
    fn a_zombie_is_gone_but_its_children_are_not() {
        let table = HashMap::from([(10, Entry { is_zombie: true, ..entry(1, 5) }), (11, entry(10, 6))]);
        let found: Vec<i32> = descend(&table, 1, &HashSet::new()).iter().map(|m| m.pid).collect();
        assert_eq!(found, [11]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_very_process_is_in_the_table() {
        let own = read_table()[&own_pid()];
        assert!(!own.is_zombie);
        assert!(own.started > 0);
    }
}
