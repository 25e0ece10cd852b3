//! Parses PTX text to statements: opcodes and operands, each with its line.

mod lexer;
mod statement;

use std::collections::HashMap;

pub use statement::{Body, Class, Operand, Statement, parse_body};

use crate::ParseError;

/// A parameter of an entry: its name and its position in the parameter bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the code.
    pub name: String,
    /// Offset of its first byte.
    pub offset: usize,
    /// Number of bytes.
    pub size: usize,
}

/// An entry's text, not yet decoded.
#[derive(Clone, Debug)]
pub struct EntryText {
    /// Its name.
    pub name: String,
    /// Parameters in the order of the declaration.
    pub parameters: Vec<Parameter>,
    /// From `.maxntid`: the product of all three dimensions.
    pub max_threads: Option<u32>,
    /// From `.maxnreg`.
    pub max_registers: Option<u32>,
    /// From `.minnctapersm`.
    pub min_blocks: Option<u32>,
    /// Blocks of a cluster, along x, from `.reqnctapercluster`.
    pub cluster: Option<u32>,
    /// Byte range of the body in the module's text, without braces.
    pub body: std::ops::Range<usize>,
    /// Line of the body's first byte, from 1.
    pub line: u32,
}

/// Declarations of a module.
#[derive(Debug, Default)]
pub struct Declarations {
    /// Entries by name.
    pub entries: HashMap<String, EntryText>,
    /// Entries in the order of the text.
    pub order: Vec<String>,
    /// Names of `.extern .shared` arrays, which start at the dynamic shared memory.
    pub dynamic_shared: Vec<String>,
    /// Arrays in shared memory that all entries may use: name, bytes and alignment.
    pub shared: Vec<(String, usize, usize)>,
    /// Constant tables of the module, one after the other.
    pub constants: Vec<u8>,
    /// Offset of each table.
    pub constant_names: HashMap<String, usize>,
    /// Source files by number, from `.file`.
    pub files: HashMap<u32, String>,
}

/// Finds the entries of a module and its shared declarations.
pub fn declarations(text: &str) -> Result<Declarations, ParseError> {
    let mut found = Declarations::default();
    let mut at = 0;
    let mut line = 1_u32;
    while at < text.len() {
        let end = text[at..].find('\n').map_or(text.len(), |n| at + n + 1);
        let code = text[at..end].split("//").next().unwrap_or_default().trim();
        if let Some(offset) = code.find(".entry ") {
            let name_and_more = &code[offset + 7..];
            let name = name_and_more
                .split(|c: char| c == '(' || c == '{' || c.is_whitespace())
                .next()
                .unwrap_or_default()
                .to_owned();
            let (entry, after, lines) = entry(text, at, line, name)?;
            line += lines;
            at = after;
            found.order.push(entry.name.clone());
            found.entries.insert(entry.name.clone(), entry);
            continue;
        }
        let mut words = code.split_whitespace();
        match words.next() {
            Some(".extern") if words.next() == Some(".shared") => {
                let name = code.trim_end_matches([';', '[', ']']);
                let name = name.rsplit(char::is_whitespace).next().unwrap_or_default();
                found
                    .dynamic_shared
                    .push(name.trim_end_matches("[]").to_owned());
            }
            Some(".file") => {
                let number = words.next().and_then(|word| word.parse().ok());
                let name = code.split('"').nth(1);
                if let (Some(number), Some(name)) = (number, name) {
                    found.files.insert(number, name.to_owned());
                }
            }
            Some(".global" | ".const") => {
                let constant = constant(code, found.constants.len())
                    .ok_or_else(|| ParseError::new(line, "a variable of the module", code))?;
                let (name, offset, bytes) = constant;
                found.constants.resize(offset, 0);
                found.constants.extend(bytes);
                found.constant_names.insert(name, offset);
            }
            Some(".shared") => {
                let (name, bytes, align) = array(code.trim_end_matches(';'))
                    .ok_or_else(|| ParseError::new(line, "a variable of the module", code))?;
                found.shared.push((name.to_owned(), bytes, align));
            }
            Some(".visible") if !code.contains(".func") => {
                return Err(ParseError::new(line, "a variable of the module", code));
            }
            _ => {}
        }
        at = end;
        line += 1;
    }
    Ok(found)
}

/// Parses the entry whose declaration begins in the line at `at`. Returns the entry, the end of its text, and the
/// number of lines up to there.
fn entry(
    text: &str,
    at: usize,
    line: u32,
    name: String,
) -> Result<(EntryText, usize, u32), ParseError> {
    let fail = |what| ParseError::new(line, what, &name);
    let open = text[at..]
        .find('{')
        .map(|n| at + n)
        .ok_or_else(|| fail("an entry without a body"))?;
    let head = &text[at..open];
    let parameters = match (head.find('('), head.rfind(')')) {
        (Some(first), Some(last)) => parameters(&head[first + 1..last])
            .ok_or_else(|| fail("a parameter list that is not understood"))?,
        _ => Vec::new(),
    };
    let sizes = |key: &str| {
        let value = head.split(key).nth(1)?;
        let value = value.split(['.', '{']).next()?;
        let numbers = value.split(',').map(|number| number.trim().parse().ok());
        numbers.collect::<Option<Vec<u32>>>()
    };
    let directive = |key: &str| Some(sizes(key)?.into_iter().product());
    let max_threads = directive(".maxntid");
    let min_blocks = directive(".minnctapersm");
    let max_registers = directive(".maxnreg");
    let cluster = sizes(".reqnctapercluster").unwrap_or_default();
    if head.contains(".explicitcluster") || cluster.iter().skip(1).any(|&size| size != 1) {
        return Err(fail("clusters that are not only along x"));
    }
    let mut depth = 0_u32;
    let mut in_comment = false;
    let bytes = text.as_bytes();
    let mut end = open;
    while end < bytes.len() {
        match bytes[end] {
            b'\n' => in_comment = false,
            b'/' if bytes.get(end + 1) == Some(&b'/') => in_comment = true,
            b'{' if !in_comment => depth += 1,
            b'}' if !in_comment => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            _ => {}
        }
        end += 1;
    }
    if end == bytes.len() {
        return Err(fail("a body without an end"));
    }
    let lines = |range: &str| range.bytes().filter(|&byte| byte == b'\n').count() as u32;
    let body_line = line + lines(&text[at..open + 1]);
    let entry = EntryText {
        name,
        parameters,
        max_threads,
        max_registers,
        min_blocks,
        cluster: cluster.first().copied(),
        body: open + 1..end,
        line: body_line,
    };
    Ok((entry, end + 1, lines(&text[at..end + 1])))
}

/// `.global .align 4 .b8 name[16] = {1, 2};`: name, offset after `end` bytes, bytes.
fn constant(code: &str, end: usize) -> Option<(String, usize, Vec<u8>)> {
    let (declaration, values) = match code.split_once('=') {
        Some((declaration, values)) => (declaration, values),
        None => (code.trim_end_matches(';'), "{}"),
    };
    let (name, count, align) = array(declaration)?;
    let values = values
        .trim()
        .trim_start_matches('{')
        .trim_end_matches([';', '}']);
    let values = values
        .split(',')
        .map(str::trim)
        .filter(|value| !value.is_empty());
    let mut bytes = values
        .map(|value| value.parse().ok())
        .collect::<Option<Vec<u8>>>()?;
    bytes.resize(count, 0);
    Some((name.to_owned(), end.next_multiple_of(align), bytes))
}

/// `.shared .align 4 .b8 name[16]`: name, bytes, alignment.
fn array(declaration: &str) -> Option<(&str, usize, usize)> {
    let mut align = 1;
    let mut words = declaration.split_whitespace().skip(1);
    let name = loop {
        match words.next()? {
            ".align" => align = words.next()?.parse().ok()?,
            ".b8" => {}
            word if word.starts_with('.') => return None,
            word => break word,
        }
    };
    let (name, count) = name.split_once('[')?;
    Some((name, count.trim_end_matches(']').parse().ok()?, align))
}

/// `.param .align 8 .b8 name[104], .param .u64 other`.
fn parameters(list: &str) -> Option<Vec<Parameter>> {
    let mut found: Vec<Parameter> = Vec::new();
    let mut offset = 0_usize;
    for declaration in list.split(',').map(str::trim).filter(|d| !d.is_empty()) {
        let mut align = None;
        let mut element = 0;
        let mut words = declaration.split_whitespace().peekable();
        let mut name = "";
        while let Some(word) = words.next() {
            match word {
                ".param" | ".ptr" | ".global" | ".const" => {}
                ".align" => align = words.next()?.parse::<usize>().ok(),
                word if word.starts_with('.') => {
                    element = word
                        .trim_start_matches(|c: char| !c.is_ascii_digit())
                        .parse::<usize>()
                        .ok()?
                        / 8;
                }
                word => name = word,
            }
        }
        let (name, count) = match name.split_once('[') {
            Some((name, count)) => (name, count.trim_end_matches(']').parse().ok()?),
            None => (name, 1),
        };
        let size = element * count;
        let align = align.unwrap_or(element).max(1);
        offset = offset.next_multiple_of(align);
        found.push(Parameter {
            name: name.to_owned(),
            offset,
            size,
        });
        offset += size;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_at_their_alignment() {
        let list = parameters(
            "\n\t.param .align 8 .b8 f_param_0[20],\n\t.param .u64 .ptr .align 1 f_param_1,\n\t.param .u32 f_param_2\n",
        )
        .unwrap();
        let places: Vec<_> = list
            .iter()
            .map(|p| (p.name.as_str(), p.offset, p.size))
            .collect();
        assert_eq!(
            places,
            [
                ("f_param_0", 0, 20),
                ("f_param_1", 20, 8),
                ("f_param_2", 28, 4)
            ]
        );
    }

    #[test]
    fn tables_of_the_module_are_kept() {
        let text =
            ".global .align 4 .b8 one[3] = {7, 0, 9};\n.global .align 4 .b8 two[6] = {1, 2};\n";
        let found = declarations(text).unwrap();
        assert_eq!(found.constants, [7, 0, 9, 0, 1, 2, 0, 0, 0, 0]);
        assert_eq!(found.constant_names["two"], 4);
    }

    #[test]
    fn entries_are_found_with_their_bounds_and_lines() {
        let text = ".version 8.0\n.extern .shared .align 1024 .b8 window[];\n\
            .shared .align 8 .b8 array[24];\n\
            .visible .entry one(\n\t.param .u64 one_param_0\n)\n.maxntid 128, 2, 1\n.minnctapersm 3\n.reqnctapercluster 2, 1, 1\n{\n\tret;\n}\n\
            // .entry none(\n.visible .entry two()\n{\n\t{ ret; }\n}\n";
        let found = declarations(text).unwrap();
        assert_eq!(found.order, ["one", "two"]);
        assert_eq!(found.dynamic_shared, ["window"]);
        let one = &found.entries["one"];
        assert_eq!((one.max_threads, one.min_blocks), (Some(256), Some(3)));
        assert_eq!((one.cluster, found.entries["two"].cluster), (Some(2), None));
        assert_eq!(found.shared, [("array".to_owned(), 24, 8)]);
        assert_eq!(text[one.body.clone()].trim(), "ret;");
        assert_eq!(one.line, 10);
        assert_eq!(text[found.entries["two"].body.clone()].trim(), "{ ret; }");
        assert_eq!(found.entries["two"].line, 15);
    }
}
