//! Kernels in which every barrier, copy and claim waits a random time first: what is right by luck of timing alone goes
//! wrong with them.
//!
//! The waits are put into the PTX of the packed kernels, so that nothing else differs from them. Which of them sleep, and
//! how long, follows from a seed, the place, and the clock of the SM.

use std::{fs, path::Path, process::Command};

use rayon::prelude::*;
use tandem_attn::exec::gpu::{MODULES, Module, module_file, modules_of};

use crate::modules::AS_THEY_ARE;

/// Instructions that wait, arrive, copy or claim; a wait comes before each.
const MEET: [&str; 14] = [
    "mbarrier.arrive",
    "mbarrier.expect_tx",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "bar.sync",
    "bar.arrive",
    "barrier.",
    "bar.warp.sync",
    "atom.",
    "red.",
    "cp.async.bulk",
    "cp.async.commit_group",
    "cp.async.wait",
    "griddepcontrol",
];

/// The text with waits, and how many.
fn delayed(ptx: &str, seed: u32) -> (String, usize) {
    let (mut text, mut count) = (String::with_capacity(2 * ptx.len()), 0);
    for line in ptx.lines() {
        let code = line.trim_start();
        // The loops of waits are a line each: `{ .reg .pred p; WAIT: mbarrier.try_wait…`.
        let code = code.strip_prefix("{ .reg .pred p; ").unwrap_or(code);
        let code = code.strip_prefix("{{ .reg .pred p;").unwrap_or(code);
        // A guard is of the instruction alone: a wait for some lanes only would part them.
        let code = match code.split_once(' ') {
            Some((guard, code)) if guard.starts_with('@') => code.trim_start(),
            _ => code,
        };
        let alone = !code.starts_with("WAIT:") && !code.starts_with('$');
        if alone && MEET.iter().any(|meets| code.starts_with(meets)) {
            let place = (count as u32).wrapping_mul(0x85EB_CA6B) ^ seed;
            // One of four sleeps, up to two microseconds.
            let sleep = format!(
                "{{ .reg .b32 t, u; .reg .pred q; mov.u32 t, %clock; mad.lo.u32 t, t, 0x9E3779B1, {place}; \
                 shr.u32 u, t, 30; setp.eq.u32 q, u, 0; bfe.u32 t, t, 8, 11; @q nanosleep.u32 t; }}\n"
            );
            text += &sleep;
            count += 1;
        }
        text += line;
        text.push('\n');
    }
    (text, count)
}

/// Writes delayed kernels into a folder, and assembles them: those in the program, or those of the folder `from`.
///
/// # Errors
/// Where that cannot be.
pub fn write(
    folder: &Path,
    seed: u32,
    only: Option<&str>,
    from: Option<&Path>,
) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    let assembler = std::env::var("TANDEM_PTXAS").unwrap_or_else(|_| ".tools/bin/ptxas".into());
    let wanted = |module: &&Module| {
        !AS_THEY_ARE.contains(&module.family)
            && only.is_none_or(|only| format!("{}-{}", module.arch, module.family).contains(only))
    };
    let modules = match from {
        Some(from) => modules_of(from).map_err(|error| error.to_string())?.modules,
        None => MODULES.to_vec(),
    };
    let modules: Vec<&Module> = modules.iter().filter(wanted).collect();
    modules.into_par_iter().try_for_each(|module| {
        let ptx = module.ptx.unpack().map_err(|error| error.to_string())?;
        let (text, count) = delayed(&String::from_utf8_lossy(&ptx), seed);
        let file = module_file(folder, module, "ptx");
        fs::write(&file, text).map_err(|error| error.to_string())?;
        let done = Command::new(&assembler)
            .args(["-O3", "--gpu-name", module.arch, "--output-file"])
            .arg(module_file(folder, module, "cubin"))
            .arg(&file)
            .output()
            .map_err(|error| format!("{assembler}: {error}"))?;
        println!("{}: {count} waits", file.display());
        match done.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        }
    })
}
