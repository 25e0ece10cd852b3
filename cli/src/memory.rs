//! Free memory, which is checked before any allocation whose size depends on user input.

use crate::{Failure, table::scaled};

/// Assumed if the system gives no information.
const GUESS: u64 = 4 << 30;

/// Bytes that this process can still allocate, given the machine, the control group and the process limit.
#[must_use]
pub fn available() -> u64 {
    let machine = field("/proc/meminfo", "MemAvailable:").map(|kilobytes| kilobytes * 1024);
    [machine.unwrap_or(GUESS), of_group(), of_process()]
        .into_iter()
        .fold(u64::MAX, u64::min)
}

/// Refuses an allocation that exceeds the free memory.
///
/// # Errors
/// [`Failure::Input`] that says what needs the memory, both sizes, and what to do.
pub fn check(what: &str, needed: u64, advice: &str) -> Result<(), Failure> {
    let free = available();
    if needed <= free {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "{what} needs {} of memory and {} are free: {advice}",
        scaled(needed as f64, "B"),
        scaled(free as f64, "B")
    )))
}

/// The number after a word in a file of lines.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Bytes left in the control group, if there is one with a limit.
fn of_group() -> u64 {
    let number = |name: &str| {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    match (number("memory.max"), number("memory.current")) {
        // The group's page cache counts as used, but is freed when memory is needed.
        (Some(most), Some(used)) => {
            let cached = field("/sys/fs/cgroup/memory.stat", "file ").unwrap_or(0);
            most.saturating_sub(used.saturating_sub(cached))
        }
        _ => u64::MAX,
    }
}

/// Bytes left under `ulimit -v`.
fn of_process() -> u64 {
    let limit = field("/proc/self/limits", "Max address space");
    let used = field("/proc/self/status", "VmSize:").unwrap_or(0) * 1024;
    limit.map_or(u64::MAX, |limit| limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_is_refused_with_both_sizes() {
        assert!(available() > 1 << 20);
        assert!(check("a page", 4096, "").is_ok());
        let refused = check("the moon", u64::MAX, "leave it there").unwrap_err();
        let text = refused.to_string();
        assert!(
            text.starts_with("the moon needs 18447 PB of memory and ")
                && text.ends_with(" are free: leave it there"),
            "{text}"
        );
    }
}
