//! The device code that this program carries with it.

/// All kernels for one architecture.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedModule {
    /// As ptxas names it: `sm_80`, `sm_90a`.
    pub arch: &'static str,
    /// For the driver to compile where [`cubin`](Self::cubin) does not fit. Takes it up to seconds.
    pub ptx: &'static str,
    /// Machine code, ready to load; `None` if ptxas was missing when this program was built.
    pub cubin: Option<&'static [u8]>,
}

/// One module for each architecture, the oldest first.
pub static MODULES: &[EmbeddedModule] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_module_is_for_the_architecture_it_names() {
        let archs: Vec<_> = MODULES.iter().map(|module| module.arch).collect();
        assert_eq!(archs, ["sm_80", "sm_90a"]);
        for module in MODULES {
            assert!(module.ptx.contains(&format!("\n.target {}\n", module.arch)));
            assert!(
                module
                    .cubin
                    .is_none_or(|cubin| cubin.starts_with(b"\x7fELF"))
            );
        }
    }
}
