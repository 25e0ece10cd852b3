//! Machine code of kernels: how many instructions of which kind.

use std::collections::HashMap;

/// Counts of instructions in each kernel.
#[derive(Debug, Default)]
pub struct MachineCode {
    opcodes: HashMap<String, HashMap<String, u32>>,
}

impl MachineCode {
    /// Parses the output of `nvdisasm --print-code`: a section for each kernel, a line for each instruction.
    pub fn parse(disassembly: &str) -> Self {
        let mut code = Self::default();
        let mut kernel = String::new();
        for line in disassembly.lines() {
            if let Some(name) = line
                .strip_prefix(".text.")
                .and_then(|rest| rest.strip_suffix(':'))
            {
                kernel = name.into();
            } else if let Some((_, instruction)) = line
                .trim_start()
                .strip_prefix("/*")
                .and_then(|rest| rest.split_once("*/"))
            {
                let mut words = instruction
                    .split_whitespace()
                    .skip_while(|word| word.starts_with(['@', '{']));
                let opcode = words
                    .next()
                    .unwrap_or_default()
                    .split(['.', ';'])
                    .next()
                    .unwrap_or_default();
                *code
                    .opcodes
                    .entry(kernel.clone())
                    .or_default()
                    .entry(opcode.into())
                    .or_default() += 1;
            }
        }
        code
    }

    /// Number of instructions of a kernel with this opcode.
    pub fn count(&self, kernel: &str, opcode: &str) -> u32 {
        self.opcodes
            .get(kernel)
            .and_then(|opcodes| opcodes.get(opcode))
            .copied()
            .unwrap_or(0)
    }

    /// Number of instructions without the padding at the end.
    pub fn instructions(&self, kernel: &str) -> u32 {
        let all: u32 = self
            .opcodes
            .get(kernel)
            .map(|opcodes| opcodes.values().sum())
            .unwrap_or(0);
        all - self.count(kernel, "NOP")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_counted_by_kernel() {
        let code = MachineCode::parse(
            "\t.section\t.text.copy,\"ax\",@progbits\n\
             .text.copy:\n\
             \x20       /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
             \x20       /*0010*/              @!P0 LDL.64 R2, [R1] ;\n\
             .L_x_0:\n\
             \x20       /*0020*/                   BRA `(.L_x_0);\n\
             \x20       /*0030*/                   NOP;\n\
             .text.other:\n\
             \x20       /*0000*/                   LDL R2, [R1] ;\n",
        );
        assert_eq!(code.count("copy", "LDL"), 1);
        assert_eq!(code.count("other", "LDL"), 1);
        assert_eq!(code.count("copy", "STL"), 0);
        assert_eq!(code.instructions("copy"), 3);
        assert_eq!(code.instructions("absent"), 0);
    }
}
