//! Machine code of kernels: how many instructions of which kind.

use std::collections::HashMap;

use crate::Error;

/// An instruction as the GPU reads it.
pub type Word = [u8; 16];

/// Counts of instructions in each kernel.
#[derive(Debug, Default)]
pub struct MachineCode {
    opcodes: HashMap<String, HashMap<String, u32>>,
}

impl MachineCode {
    /// Counts the instructions of a cubin's kernels. `disassemble` returns a text with a line for each word, as
    /// `nvdisasm` prints it.
    ///
    /// The word of an instruction says what it is, so each is disassembled once, however often it occurs. That is a
    /// third of what disassembling the cubin takes.
    pub fn read(
        cubin: &[u8],
        disassemble: impl FnOnce(&[Word]) -> Result<String, Error>,
    ) -> Result<Self, Error> {
        let kernels = kernels(cubin).ok_or("ptxas wrote a file that is no ELF file of 64 bits")?;
        let mut words: Vec<Word> = Vec::new();
        let mut indices: HashMap<Word, usize> = HashMap::new();
        // How often each kernel has each word.
        let mut occurrences: Vec<(&str, HashMap<usize, u32>)> = Vec::new();
        for (name, code) in kernels {
            let (instructions, []) = code.as_chunks() else {
                return Err(format!("the code of {name} ends within an instruction").into());
            };
            let mut times = HashMap::new();
            for word in instructions {
                let index = *indices.entry(*word).or_insert_with(|| {
                    words.push(*word);
                    words.len() - 1
                });
                *times.entry(index).or_default() += 1;
            }
            occurrences.push((name, times));
        }
        let text = disassemble(&words)?;
        if let Some(line) = text.lines().find(|line| has_odd_descriptor(line)) {
            return Err(format!("ptxas wrote an instruction that no GPU executes: {line}").into());
        }
        let opcodes: Vec<&str> = text.lines().filter_map(opcode).collect();
        if opcodes.len() != words.len() {
            return Err(format!(
                "nvdisasm names {} of {} instructions",
                opcodes.len(),
                words.len()
            )
            .into());
        }
        let mut code = Self::default();
        for (name, times) in occurrences {
            let counts = code.opcodes.entry(name.into()).or_default();
            for (index, times) in times {
                let opcode = opcodes[index];
                match counts.get_mut(opcode) {
                    Some(count) => *count += times,
                    None => drop(counts.insert(opcode.into(), times)),
                }
            }
        }
        Ok(code)
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

/// The opcode in a line of `nvdisasm`, without what follows its first dot. `None` if the line has no instruction.
fn opcode(line: &str) -> Option<&str> {
    let (_, instruction) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = instruction
        .split_whitespace()
        .skip_while(|word| word.starts_with(['@', '{']));
    words.next()?.split(['.', ';']).next()
}

/// Whether a descriptor is in registers that cannot have one: they are pairs that begin with an even number. ptxas 12.9 writes
/// such a `LDGSTS` if a copy has a uniform register in its target, a number of bytes and a cache policy.
fn has_odd_descriptor(line: &str) -> bool {
    let registers = line.split("desc[UR").skip(1);
    let mut numbers = registers.filter_map(|rest| rest.split(']').next()?.parse::<u32>().ok());
    numbers.any(|number| number % 2 == 1)
}

/// Name and code of each kernel in an ELF file; `None` if it is none.
fn kernels(file: &[u8]) -> Option<Vec<(&str, &[u8])>> {
    const HEADER: usize = 64;
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| Some(u16::from_le_bytes(*file.get(at..)?.first_chunk()?) as usize);
    let word = |at: usize| Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?) as usize);
    let long =
        |at: usize| usize::try_from(u64::from_le_bytes(*file.get(at..)?.first_chunk()?)).ok();
    // Positions as in `Elf64_Ehdr` and `Elf64_Shdr`.
    let (headers, count, of_names) = (long(40)?, half(60)?, half(62)?);
    let contents = |section: usize| {
        let header = headers + section * HEADER;
        file.get(long(header + 24)?..)?.get(..long(header + 32)?)
    };
    let names = contents(of_names)?;
    let mut kernels = Vec::new();
    for section in 0..count {
        let name = names.get(word(headers + section * HEADER)?..)?;
        let name = str::from_utf8(name.split(|&byte| byte == 0).next()?).ok()?;
        if let Some(kernel) = name.strip_prefix(".text.") {
            kernels.push((kernel, contents(section)?));
        }
    }
    Some(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with these sections.
    fn elf(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        let mut names = Vec::new();
        let mut headers = Vec::new();
        let mut add = |file: &mut Vec<u8>, name: usize, code: &[u8]| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(name as u32).to_le_bytes());
            header[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(code.len() as u64).to_le_bytes());
            headers.extend(header);
            file.extend(code);
        };
        for (name, code) in sections {
            add(&mut file, names.len(), code);
            names.extend(name.bytes().chain([0]));
        }
        add(&mut file, names.len() - 1, &names);
        let at = (file.len() as u64).to_le_bytes();
        let count = sections.len() as u16;
        file[40..48].copy_from_slice(&at);
        file[60..62].copy_from_slice(&(count + 1).to_le_bytes());
        file[62..64].copy_from_slice(&count.to_le_bytes());
        file.extend(headers);
        file
    }

    #[test]
    fn machine_code_is_counted_by_kernel() {
        let code = |words: &[u8]| -> Vec<u8> { words.iter().flat_map(|&w| [w; 16]).collect() };
        let file = elf(&[
            (".text.copy", &code(&[7, 3, 3, 9, 4, 4])),
            (".nv.info", &code(&[5])),
            (".text.other", &code(&[3])),
        ]);
        let read = MachineCode::read(&file, |words| {
            assert_eq!(words, [[7; 16], [3; 16], [9; 16], [4; 16]]);
            Ok("\t.target\tsm_90a\n\
                \x20       /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
                \x20       /*0010*/              @!P0 LDL.64 R2, [R1] ;\n\
                \x20       /*0020*/                   BRA 0x0;\n\
                \x20       /*0030*/                   NOP;\n"
                .into())
        })
        .unwrap();
        assert_eq!(read.count("copy", "LDL"), 2);
        assert_eq!(read.count("other", "LDL"), 1);
        assert_eq!(read.count("copy", "STL"), 0);
        assert_eq!(read.instructions("copy"), 4);
        assert_eq!(read.instructions("absent"), 0);
    }

    #[test]
    fn damaged_cubins_are_refused() {
        let file = elf(&[(".text.copy", &[7; 24])]);
        let read = |file: &[u8]| MachineCode::read(file, |_| Ok(String::new()));
        let reason = read(&file).unwrap_err().to_string();
        assert!(reason.contains("ends within an instruction"), "{reason}");
        let reason = read(&file[..file.len() - 64]).unwrap_err().to_string();
        assert!(reason.contains("no ELF file"), "{reason}");
        let whole = elf(&[(".text.copy", &[7; 16])]);
        let reason = read(&whole).unwrap_err().to_string();
        assert_eq!(reason, "nvdisasm names 0 of 1 instructions");
        // The GPU reported an illegal instruction.
        let odd = "/*0000*/ LDGSTS.E.BYPASS.128 [R14+UR0+0xd000], desc[UR1][R8.64], P1 ;";
        let read = MachineCode::read(&whole, |_| Ok(odd.into()));
        let reason = read.unwrap_err().to_string();
        assert!(reason.contains("desc[UR1][R8.64]"), "{reason}");
        let even = odd.replace("UR1]", "UR10]");
        assert!(MachineCode::read(&whole, |_| Ok(even)).is_ok());
    }
}
