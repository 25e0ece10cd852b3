//! Decodes statements to instructions. An unsupported statement is an error with its line.

mod asynchronous;
mod memory;
mod scalar;
mod warp;

use std::{borrow::Cow, collections::HashMap};

use crate::{
    ParseError,
    op::{Address, Instruction, Op, Row},
    parse::{Body, Class, Declarations, EntryText, Operand, Statement, parse_body},
};

/// A special register that has a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NWarpId,
    NSmid,
    LaneMask(LaneMask),
    DynamicShared,
    TotalShared,
    /// Rank of the block in its cluster, along x.
    ClusterRank,
    ClusterSize,
    ClusterIndex,
    Clusters,
    Zero,
    One,
}

/// The lanes in a mask register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneMask {
    Eq,
    Lt,
    Le,
    Gt,
    Ge,
}

/// A decoded entry.
#[derive(Debug)]
pub struct Code {
    pub name: String,
    pub instructions: Vec<Instruction>,
    /// For each conditional branch, where its lanes reconverge; `u32::MAX` if only at the end.
    pub meet: Vec<u32>,
    /// Line of each instruction in the module's text.
    pub lines: Vec<u32>,
    /// Source file number and line of each instruction, if known.
    pub sources: Vec<Option<(u32, u32)>>,
    /// Numbers of rows: predicates, words, longs.
    pub rows: [u32; 3],
    pub bit_constants: Vec<(Row, bool)>,
    pub word_constants: Vec<(Row, u32)>,
    pub long_constants: Vec<(Row, u64)>,
    pub specials: Vec<(Row, Special)>,
    /// Total bytes of the parameters.
    pub parameter_bytes: usize,
    /// Bytes of static shared memory.
    pub shared: usize,
    pub max_threads: Option<u32>,
    pub max_registers: Option<u32>,
    pub min_blocks: Option<u32>,
    /// The size of a cluster that the entry asks for.
    pub cluster: Option<u32>,
}

/// Generic address of a module's constant tables.
pub const CONSTANT_BASE: u64 = 0x6000_0000_0000;
/// Generic address at which a block sees its shared memory.
pub const SHARED_BASE: u64 = 0x6100_0000_0000;
/// Generic address at which a block sees its parameters.
pub const PARAM_BASE: u64 = 0x6200_0000_0000;

/// Decodes an entry.
pub fn decode(text: &str, shared: &Declarations, entry: &EntryText) -> Result<Code, ParseError> {
    let body_text = &text[entry.body.clone()];
    let body = parse_body(body_text, entry.line)?;
    if let Some((name, ..)) = body.local.first() {
        return Err(ParseError::new(entry.line, "local memory", name));
    }
    let mut decoder = Decoder::new(&body, shared, entry, body_text);
    let mut instructions = Vec::with_capacity(body.statements.len());
    for statement in &body.statements {
        let op = decoder.statement(statement)?;
        instructions.push(Instruction {
            op,
            guard: statement.guard,
        });
    }
    let (mut lines, mut sources): (Vec<_>, Vec<_>) = body
        .statements
        .iter()
        .map(|statement| (statement.line, statement.source))
        .unzip();
    let ends = |last: &Instruction| {
        let never_next = matches!(last.op, Op::Exit | Op::Branch { .. } | Op::Trap { .. });
        never_next && last.guard.is_none()
    };
    if !instructions.last().is_some_and(ends) {
        // Threads end where the code does.
        instructions.push(Instruction {
            op: Op::Exit,
            guard: None,
        });
        lines.push(lines.last().copied().unwrap_or(entry.line));
        sources.push(None);
    }
    let meet = crate::flow::meeting_points(&instructions);
    let last = entry.parameters.last();
    Ok(Code {
        name: entry.name.clone(),
        meet,
        lines,
        sources,
        rows: decoder.rows,
        bit_constants: decoder
            .bit_constants
            .into_iter()
            .map(|(value, row)| (row, value))
            .collect(),
        word_constants: decoder
            .word_constants
            .into_iter()
            .map(|(value, row)| (row, value))
            .collect(),
        long_constants: decoder
            .long_constants
            .into_iter()
            .map(|(value, row)| (row, value))
            .collect(),
        specials: decoder
            .specials
            .into_iter()
            .map(|(special, row)| (row, special))
            .collect(),
        parameter_bytes: last.map_or(0, |last| last.offset + last.size),
        shared: decoder.shared_bytes,
        max_threads: entry.max_threads,
        max_registers: entry.max_registers,
        min_blocks: entry.min_blocks,
        cluster: entry.cluster,
        instructions,
    })
}

pub(crate) struct Decoder<'a> {
    rows: [u32; 3],
    bit_constants: HashMap<bool, Row>,
    word_constants: HashMap<u32, Row>,
    long_constants: HashMap<u64, Row>,
    specials: HashMap<Special, Row>,
    /// Values of names: parameters, arrays in shared memory, tables.
    names: HashMap<&'a str, u64>,
    shared_bytes: usize,
}

type Decoded<T> = Result<T, String>;

impl<'a> Decoder<'a> {
    fn new(
        body: &'a Body,
        module: &'a Declarations,
        entry: &'a EntryText,
        body_text: &str,
    ) -> Self {
        let mut names = HashMap::new();
        let mut end = 0_usize;
        // Of the module's arrays, an entry has those that it names.
        let of_module = module.shared.iter();
        let named = of_module.filter(|(name, ..)| is_named(body_text, name));
        for (name, bytes, align) in named.chain(&body.shared) {
            let at = end.next_multiple_of(*align);
            names.insert(name.as_str(), at as u64);
            end = at + bytes;
        }
        let window = if end == 0 {
            0
        } else {
            end.next_multiple_of(1024)
        };
        for name in &module.dynamic_shared {
            names.insert(name, window as u64);
        }
        for parameter in &entry.parameters {
            names.insert(&parameter.name, parameter.offset as u64);
        }
        for (name, &offset) in &module.constant_names {
            names.insert(name, CONSTANT_BASE + offset as u64);
        }
        Self {
            rows: body.registers,
            bit_constants: HashMap::new(),
            word_constants: HashMap::new(),
            long_constants: HashMap::new(),
            specials: HashMap::new(),
            names,
            shared_bytes: window,
        }
    }

    fn statement(&mut self, statement: &Statement) -> Result<Op, ParseError> {
        let parts: Vec<&str> = statement.opcode.split('.').collect();
        let mut operands = Cow::Borrowed(statement.operands.as_slice());
        // Registers hold values of 16 bits without their sign, and constants may be written with it.
        if matches!(parts.last(), Some(&("b16" | "u16" | "s16"))) {
            for operand in operands.to_mut() {
                if let Operand::Immediate(value) = operand {
                    *value &= 0xFFFF;
                }
            }
        }
        let operands = &*operands;
        let decoded = self
            .scalar(&parts, operands)
            .or_else(|| self.memory(&parts, operands))
            .or_else(|| self.warp(&parts, operands))
            .or_else(|| self.asynchronous(&parts, operands));
        match decoded {
            Some(Ok(op)) => Ok(op),
            Some(Err(reason)) => Err(ParseError::new(statement.line, &reason, &statement.opcode)),
            None => Err(ParseError::new(
                statement.line,
                "an instruction that this emulator does not know",
                &statement.opcode,
            )),
        }
    }

    fn fresh(&mut self, class: Class) -> Row {
        let rows = &mut self.rows[class as usize];
        *rows += 1;
        *rows - 1
    }

    /// A predicate operand that is read.
    fn bit(&mut self, operand: &Operand) -> Decoded<Row> {
        let Operand::Immediate(value) = operand else {
            return bit(operand);
        };
        let value = *value != 0;
        if let Some(&row) = self.bit_constants.get(&value) {
            return Ok(row);
        }
        let row = self.fresh(Class::Predicate);
        self.bit_constants.insert(value, row);
        Ok(row)
    }

    fn word_constant(&mut self, value: u32) -> Row {
        if let Some(&row) = self.word_constants.get(&value) {
            return row;
        }
        let row = self.fresh(Class::Word);
        self.word_constants.insert(value, row);
        row
    }

    fn long_constant(&mut self, value: u64) -> Row {
        if let Some(&row) = self.long_constants.get(&value) {
            return row;
        }
        let row = self.fresh(Class::Long);
        self.long_constants.insert(value, row);
        row
    }

    fn special(&mut self, special: Special) -> Row {
        if let Some(&row) = self.specials.get(&special) {
            return row;
        }
        let row = self.fresh(Class::Word);
        self.specials.insert(special, row);
        row
    }

    /// A word operand that is read.
    fn word(&mut self, operand: &Operand) -> Decoded<Row> {
        match operand {
            Operand::Register(Class::Word, row) => Ok(*row),
            Operand::Immediate(value) => Ok(self.word_constant(*value as u32)),
            Operand::Special(name) => match special(name) {
                Some(special) => Ok(self.special(special)),
                None => Err(format!("the special register {name}")),
            },
            Operand::Name(name) => match self.names.get(name.as_str()) {
                Some(&value) => Ok(self.word_constant(value as u32)),
                None => Err(format!("the unknown name {name}")),
            },
            _ => Err(format!("an operand that is no word: {operand:?}")),
        }
    }

    /// A long operand that is read.
    fn long(&mut self, operand: &Operand) -> Decoded<Row> {
        match operand {
            Operand::Register(Class::Long, row) => Ok(*row),
            Operand::Immediate(value) => Ok(self.long_constant(*value as u64)),
            Operand::Name(name) => match self.names.get(name.as_str()) {
                Some(&value) => Ok(self.long_constant(value)),
                None => Err(format!("the unknown name {name}")),
            },
            _ => Err(format!("an operand that is no long: {operand:?}")),
        }
    }

    fn number(operand: &Operand) -> Decoded<u32> {
        match operand {
            Operand::Immediate(value) => Ok(*value as u32),
            _ => Err(format!("an operand that is no number: {operand:?}")),
        }
    }

    fn words(&mut self, operand: &Operand) -> Decoded<Box<[Row]>> {
        match operand {
            Operand::List(list) => list.iter().map(|operand| self.word(operand)).collect(),
            one => Ok(Box::new([self.word(one)?])),
        }
    }

    fn fixed<const N: usize>(&mut self, operand: &Operand) -> Decoded<[Row; N]> {
        let words = self.words(operand)?;
        <[Row; N]>::try_from(&*words)
            .map_err(|_| format!("{} registers where {N} should be", words.len()))
    }

    fn address(&mut self, operand: &Operand) -> Decoded<Address> {
        let Operand::Memory(base, offset, coordinates) = operand else {
            return Err(format!("an operand that is no address: {operand:?}"));
        };
        if !coordinates.is_empty() {
            return Err("an address with coordinates".into());
        }
        let (row, long) = match &**base {
            Operand::Register(Class::Word, row) => (*row, false),
            other => (self.long(other)?, true),
        };
        Ok(Address {
            row,
            long,
            offset: *offset,
        })
    }
}

/// Whether the text has this name, and not only a longer one.
fn is_named(text: &str, name: &str) -> bool {
    let of_name = |c: char| c.is_ascii_alphanumeric() || "_$.".contains(c);
    text.match_indices(name).any(|(at, _)| {
        !text[..at].ends_with(of_name) && !text[at + name.len()..].starts_with(of_name)
    })
}

/// A register operand that is written.
fn written(operand: &Operand, class: Class) -> Decoded<Row> {
    match operand {
        Operand::Register(found, row) if *found == class => Ok(*row),
        _ => Err(format!(
            "an operand that is no {class:?} register: {operand:?}"
        )),
    }
}

fn word_written(operand: &Operand) -> Decoded<Row> {
    written(operand, Class::Word)
}

fn long_written(operand: &Operand) -> Decoded<Row> {
    written(operand, Class::Long)
}

fn bit(operand: &Operand) -> Decoded<Row> {
    written(operand, Class::Predicate)
}

/// A word register, or `_`.
fn optional_word(operand: &Operand) -> Decoded<Option<Row>> {
    match operand {
        Operand::Nothing => Ok(None),
        other => word_written(other).map(Some),
    }
}

/// A predicate that may be negated.
fn maybe_not(operand: &Operand) -> Decoded<(Row, bool)> {
    match operand {
        Operand::Not(inner) => Ok((bit(inner)?, true)),
        other => Ok((bit(other)?, false)),
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    let (base, rest) = name.split_once('.').unwrap_or((name, ""));
    Some(match (base, rest) {
        ("%tid", rest) => Special::Tid(axis(rest)?),
        ("%ntid", rest) => Special::Ntid(axis(rest)?),
        ("%ctaid", rest) => Special::Ctaid(axis(rest)?),
        ("%nctaid", rest) => Special::Nctaid(axis(rest)?),
        ("%laneid", "") => Special::LaneId,
        ("%warpid", "") => Special::WarpId,
        ("%nwarpid", "") => Special::NWarpId,
        ("%nsmid", "") => Special::NSmid,
        ("%lanemask_eq", "") => Special::LaneMask(LaneMask::Eq),
        ("%lanemask_lt", "") => Special::LaneMask(LaneMask::Lt),
        ("%lanemask_le", "") => Special::LaneMask(LaneMask::Le),
        ("%lanemask_gt", "") => Special::LaneMask(LaneMask::Gt),
        ("%lanemask_ge", "") => Special::LaneMask(LaneMask::Ge),
        ("%dynamic_smem_size", "") => Special::DynamicShared,
        ("%total_smem_size", "") => Special::TotalShared,
        ("%cluster_ctaid", "x") | ("%cluster_ctarank", "") => Special::ClusterRank,
        ("%cluster_nctaid", "x") | ("%cluster_nctarank", "") => Special::ClusterSize,
        ("%cluster_ctaid", "y" | "z") => Special::Zero,
        ("%cluster_nctaid", "y" | "z") => Special::One,
        ("%clusterid", "x") => Special::ClusterIndex,
        ("%nclusterid", "x") => Special::Clusters,
        _ => return None,
    })
}
