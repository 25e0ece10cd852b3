//! What the report takes from PTX: barriers, and data that kernels would wait for.

use cuda_builder::ptx;

/// The first variable of a module, in global or constant memory: LLVM makes tables of `match`.
pub fn data_in_memory(ptx: &str) -> Option<&str> {
    let is_variable = |line: &&str| {
        let mut words = line.split_whitespace();
        let first = words.find(|word| ![".visible", ".weak", ".extern"].contains(word));
        matches!(first, Some(".global" | ".const"))
    };
    ptx.lines().find(is_variable)
}

/// Numbers of barrier instructions in a kernel's PTX.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Barriers {
    /// `bar.sync 0`, named barriers, and newer names of these.
    pub block: u32,
    pub warp: u32,
    pub cluster: u32,
    pub mbarrier: u32,
}

impl Barriers {
    pub fn of(body: &str) -> Self {
        let mut found = Self::default();
        for opcode in ptx::opcodes(body) {
            if opcode.starts_with("bar.warp") {
                found.warp += 1;
            } else if opcode.starts_with("barrier.cluster") {
                found.cluster += 1;
            } else if opcode.starts_with("bar.") || opcode.starts_with("barrier.") {
                found.block += 1;
            } else if opcode.starts_with("mbarrier.") {
                found.mbarrier += 1;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_in_memory_are_found() {
        let ptx = ".version 8.0\n.visible .entry kernel()\n{\n\tld.global.b32 %r1, [%rd1];\n}\n";
        assert_eq!(data_in_memory(ptx), None);
        let table = ".visible .global .align 4 .b8 switch_table[8] = {32, 0, 0, 0, 1};";
        assert_eq!(data_in_memory(&format!("{ptx}{table}\n")), Some(table));
    }

    #[test]
    fn barriers_of_a_block_are_not_those_of_a_warp_or_cluster() {
        let opcodes = [
            "bar.sync",
            "barrier.sync",
            "barrier.cta.sync.aligned",
            "bar.warp.sync",
            "barrier.cluster.arrive.aligned",
            "mbarrier.arrive.shared.b64",
            "add.s32",
        ];
        let expected = Barriers {
            block: 3,
            warp: 1,
            cluster: 1,
            mbarrier: 1,
        };
        assert_eq!(Barriers::of(&opcodes.join(" 0;\n")), expected);
    }
}
