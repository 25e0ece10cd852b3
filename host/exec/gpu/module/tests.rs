//! Which modules a GPU gets, and which PTX version a driver is too old for.

use super::{
    arch::{Arch, choose},
    *,
};

const fn module(arch: &'static str) -> Module {
    Module {
        arch,
        family: "all",
        ptx: Image::raw(b".version 8.0\n"),
        cubin: None,
    }
}

static BUILT: [Module; 3] = [module("sm_80"), module("sm_90a"), module("sm_90a")];

#[test]
fn the_highest_architecture_that_runs_is_chosen_with_all_its_modules() {
    for (gpu, arch, count) in [
        ((8, 0), "sm_80", 1),
        ((8, 9), "sm_80", 1),
        ((9, 0), "sm_90a", 2),
        ((10, 0), "sm_80", 1),
    ] {
        let (chosen, modules) = choose(&BUILT, "a GPU", gpu).unwrap();
        assert_eq!((chosen, modules.len()), (arch, count), "{gpu:?}");
    }
}

#[test]
fn a_gpu_that_is_too_old_is_told_what_there_is() {
    let error = choose(&BUILT, "a Turing", (7, 5)).unwrap_err();
    assert_eq!(
        error,
        Error::UnsupportedArchitecture {
            device: "a Turing".into(),
            compute: (7, 5),
            built_for: vec!["sm_80", "sm_90a"],
        }
    );
    assert!(error.to_string().contains("sm_80, sm_90a"), "{error}");
}

#[test]
fn machine_code_stays_in_its_generation() {
    let arch = |name| Arch::parse(name).unwrap();
    assert!(arch("sm_80").cubin_runs_on((8, 6)) && !arch("sm_80").cubin_runs_on((9, 0)));
    assert!(!arch("sm_86").cubin_runs_on((8, 0)) && !arch("sm_86").ptx_runs_on((8, 0)));
    assert!(arch("sm_90a").cubin_runs_on((9, 0)) && !arch("sm_90a").ptx_runs_on((10, 0)));
    assert_eq!(Arch::parse("compute_80"), None);
}

#[test]
fn the_version_of_ptx_is_read() {
    assert_eq!(
        ptx_version("//\n// by\n.version 8.7\n.target sm_90a"),
        (8, 7)
    );
    assert_eq!(ptx_version("nothing"), (0, 0));
}
