//! Reads and amends PTX text: entries, their launch bounds, instruction counts.
//!
//! This is not a PTX parser. It only understands the form in which LLVM prints a module (`.entry name(`, the parameter
//! list, `)`, directives, a body in braces), which is sufficient for this crate.

mod markers;

use std::ops::Range;

pub use markers::{LaunchBounds, MARKER, MarkerError, apply_markers, launch_bounds};

/// Positions of an entry's parts in a module's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name.
    pub name: &'a str,
    /// Byte range of the text between the parentheses of the parameter list.
    pub parameters: Range<usize>,
    /// Byte range of the text between the braces of the body.
    pub body: Range<usize>,
}

/// The entries of a module, in the order of the text.
#[must_use]
pub fn entries(ptx: &str) -> Vec<Entry<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(directive) = find_code(ptx, ".entry ", at) {
        let name_at = directive + ".entry ".len();
        let Some(open) = ptx[name_at..]
            .find(['(', '{'])
            .map(|offset| name_at + offset)
        else {
            break;
        };
        let name = ptx[name_at..open]
            .split_whitespace()
            .next()
            .unwrap_or_default();
        let parameters = match ptx.as_bytes()[open] {
            b'(' => open + 1..closing(ptx, open, '(', ')'),
            _ => open..open,
        };
        let Some(brace) = find_code(ptx, "{", parameters.end) else {
            break;
        };
        let body = brace + 1..closing(ptx, brace, '{', '}');
        at = body.end;
        found.push(Entry {
            name,
            parameters,
            body,
        });
    }
    found
}

/// The opcodes of the instructions in a piece of PTX, without their predicates: `bar.sync`,
/// `wgmma.mma_async.sync.aligned.m64n8k16…`.
pub fn opcodes(body: &str) -> impl Iterator<Item = &str> {
    body.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        // Inline assembly may have several instructions in a line, or a scope in braces.
        .flat_map(|line| line.split([';', '{', '}']))
        .filter_map(|statement| {
            statement
                .split_whitespace()
                .find(|word| !word.starts_with('@') && !word.ends_with(':'))
        })
}

/// Number of instructions in a piece of PTX whose opcode `counts` accepts; see [`opcodes`].
#[must_use]
pub fn count_instructions(body: &str, counts: impl Fn(&str) -> bool) -> usize {
    opcodes(body).filter(|opcode| counts(opcode)).count()
}

/// Position of `needle` from `from` on, outside of comments.
fn find_code(text: &str, needle: &str, from: usize) -> Option<usize> {
    let mut line_start = from;
    for line in text[from..].split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        if let Some(offset) = code.find(needle) {
            return Some(line_start + offset);
        }
        line_start += line.len();
    }
    None
}

/// Position of the bracket that closes the one at `open`; the end of the text if there is none.
fn closing(text: &str, open: usize, opener: char, closer: char) -> usize {
    let mut depth = 0usize;
    let mut line_start = open;
    for line in text[open..].split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        for (offset, letter) in code.char_indices() {
            if letter == opener {
                depth += 1;
            } else if letter == closer {
                depth -= 1;
                if depth == 0 {
                    return line_start + offset;
                }
            }
        }
        line_start += line.len();
    }
    text.len()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two entries, the first with a marker, as LLVM prints them.
    pub(crate) const MODULE: &str = "\
.version 8.0
.target sm_90a
.address_size 64

.func helper(
\t.param .b32 helper_param_0
)
{
\tret;
}
.visible .entry copy(
\t.param .align 16 .b8 copy_param_0[176],
\t.param .u64 .ptr .align 1 copy_param_1
)
{
\t.reg .b32 \t%r<6>;
\t// begin inline asm
\t// tandem.kernel copy max_threads=384 min_blocks=1 cluster=2 tensor_maps=1
\t// end inline asm
\t{ // callseq 0, 0
\tbar.sync \t0;
\t}
\t@%p1 bra \t$L1;
$L1: bar.sync 1; @%p1 bar.arrive 2, 64;
// a comment that opens { and says bar.sync
\tret;
}
\t// .globl\tplain
.visible .entry plain()
{
\tret;
}
";

    #[test]
    fn entries_are_found_with_their_parts() {
        let found = entries(MODULE);
        let names: Vec<_> = found.iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["copy", "plain"]);
        assert!(MODULE[found[0].parameters.clone()].contains("copy_param_1"));
        assert!(MODULE[found[0].body.clone()].trim_end().ends_with("ret;"));
        assert_eq!(MODULE[found[1].parameters.clone()].trim(), "");
        assert_eq!(MODULE[found[1].body.clone()].trim(), "ret;");
    }

    #[test]
    fn instructions_are_counted_behind_predicates_and_labels_but_not_in_comments() {
        let entry = &entries(MODULE)[0];
        let body = &MODULE[entry.body.clone()];
        assert_eq!(count_instructions(body, |opcode| opcode == "bar.sync"), 2);
        assert_eq!(
            count_instructions(body, |opcode| opcode.starts_with("bar.")),
            3
        );
        assert_eq!(count_instructions(body, |opcode| opcode == "bra"), 1);
    }
}
