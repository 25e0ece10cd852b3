//! Statements: a guard, an opcode, operands. Registers become numbers, labels become positions.

use std::{collections::HashMap, iter::Peekable};

use super::lexer::{Lexer, Token};
use crate::ParseError;

/// Register file of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// One bit per lane.
    Predicate,
    /// 32 bits, or 16 in the low half.
    Word,
    /// 64 bits.
    Long,
}

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register.
    Register(Class, u32),
    /// An integer, or the bits of a float.
    Immediate(i64),
    /// A special register, such as `%tid.x`.
    Special(String),
    /// Name of a parameter, a label or an array.
    Name(String),
    /// `_`.
    Nothing,
    /// `{a, b}`.
    List(Vec<Operand>),
    /// `[base + offset]`, with the coordinates of a box if there are any.
    Memory(Box<Operand>, i64, Vec<Operand>),
    /// `!%p1`.
    Not(Box<Operand>),
    /// `%r1|%p1`.
    Pair(Box<Operand>, Box<Operand>),
    /// Position of a label among the statements.
    Target(usize),
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Statement {
    /// Line in the module's text, from 1.
    pub line: u32,
    /// File number and line of the source, if the module has them.
    pub source: Option<(u32, u32)>,
    /// The guard predicate, and whether it is negated.
    pub guard: Option<(u32, bool)>,
    /// Opcode with all modifiers.
    pub opcode: String,
    /// Operands in the order of the text.
    pub operands: Vec<Operand>,
}

/// An entry's instructions.
#[derive(Debug, Default)]
pub struct Body {
    /// Statements in the order of the text.
    pub statements: Vec<Statement>,
    /// Number of registers of each class: predicates, words, longs.
    pub registers: [u32; 3],
    /// Static shared arrays: name, bytes and alignment.
    pub shared: Vec<(String, usize, usize)>,
    /// Local memory per thread: name, bytes and alignment.
    pub local: Vec<(String, usize, usize)>,
}

/// Registers that are declared together: `%r<9>` for `%r0` to `%r8`, or one.
struct Registers<'a> {
    name: &'a str,
    /// `None` for one register, whose name has no number.
    count: Option<u32>,
    class: Class,
    first: u32,
}

impl Registers<'_> {
    /// The register with this name. An entry has thousands, so their names are not listed.
    fn find(&self, name: &str) -> Option<(Class, u32)> {
        let number = name.strip_prefix(self.name)?;
        let Some(count) = self.count else {
            return number.is_empty().then_some((self.class, self.first));
        };
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit())
            && (number == "0" || !number.starts_with('0'));
        let index: u32 = number.parse().ok().filter(|_| is_number)?;
        (index < count).then_some((self.class, self.first + index))
    }
}

type Scope<'a> = Vec<Registers<'a>>;
type Tokens<'a> = Peekable<Lexer<'a>>;

struct Parser<'a> {
    tokens: Tokens<'a>,
    line: u32,
    body: Body,
    /// Names of registers in each open or closed scope, with its parent.
    scopes: Vec<(Scope<'a>, usize)>,
    scope: usize,
    labels: HashMap<(usize, &'a str), usize>,
    /// Label lists from which `brx.idx` selects.
    tables: HashMap<String, Vec<String>>,
    /// The scope of each statement, to resolve its labels.
    scope_of: Vec<usize>,
    source: Option<(u32, u32)>,
}

/// Parses the text between an entry's braces; `line` is the line of its first byte.
pub fn parse_body(text: &str, line: u32) -> Result<Body, ParseError> {
    let mut parser = Parser {
        tokens: Lexer::new(text, line).peekable(),
        line,
        body: Body::default(),
        scopes: vec![(Vec::new(), 0)],
        scope: 0,
        labels: HashMap::new(),
        tables: HashMap::new(),
        scope_of: Vec::new(),
        source: None,
    };
    while let Some((line, token)) = parser.tokens.next() {
        parser.line = line;
        match token {
            Token::Mark(b'{') => {
                parser.scopes.push((Vec::new(), parser.scope));
                parser.scope = parser.scopes.len() - 1;
            }
            Token::Mark(b'}') => parser.scope = parser.scopes[parser.scope].1,
            Token::Mark(b';') => {}
            Token::Mark(b'@') => parser.guarded()?,
            Token::Word(word) if word.starts_with('.') => parser.directive(word)?,
            Token::Word(word) => {
                if let Some(&(_, Token::Mark(b':'))) = parser.tokens.peek() {
                    parser.tokens.next();
                    parser.label(word)?;
                } else {
                    parser.statement(None, word)?;
                }
            }
            Token::Mark(mark) => {
                return Err(parser.fail("an unexpected mark", &(mark as char).to_string()));
            }
        }
    }
    parser.resolve()
}

impl<'a> Parser<'a> {
    fn fail(&self, what: &str, text: &str) -> ParseError {
        ParseError::new(self.line, what, text)
    }

    fn next(&mut self) -> Result<Token<'a>, ParseError> {
        match self.tokens.next() {
            Some((line, token)) => {
                self.line = line;
                Ok(token)
            }
            None => Err(self.fail("an unfinished statement", "")),
        }
    }

    fn word(&mut self) -> Result<&'a str, ParseError> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            Token::Mark(mark) => {
                Err(self.fail("a mark where a word should be", &(mark as char).to_string()))
            }
        }
    }

    fn accept(&mut self, mark: u8) -> bool {
        let there = matches!(self.tokens.peek(), Some(&(_, Token::Mark(found))) if found == mark);
        if there {
            self.tokens.next();
        }
        there
    }

    fn expect(&mut self, mark: u8) -> Result<(), ParseError> {
        if self.accept(mark) {
            return Ok(());
        }
        Err(self.fail(
            "something else where a mark should be",
            &(mark as char).to_string(),
        ))
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, ParseError> {
        let word = self.word()?;
        word.parse().map_err(|_| self.fail("no number", word))
    }

    fn directive(&mut self, word: &str) -> Result<(), ParseError> {
        match word {
            ".reg" => self.registers(),
            ".shared" | ".local" => self.array(word == ".shared"),
            ".loc" => {
                let (file, line) = (self.number()?, self.number()?);
                self.source = Some((file, line));
                let here = self.line;
                // The rest of the directive extends to the end of its line.
                while self.tokens.peek().is_some_and(|&(line, _)| line == here) {
                    self.tokens.next();
                }
                Ok(())
            }
            ".pragma" => {
                while !self.accept(b';') {
                    self.next()?;
                }
                Ok(())
            }
            _ => Err(self.fail("an unknown directive", word)),
        }
    }

    fn registers(&mut self) -> Result<(), ParseError> {
        let kind = self.word()?;
        let class = match kind {
            ".pred" => Class::Predicate,
            ".b16" | ".u16" | ".s16" | ".b32" | ".u32" | ".s32" | ".f32" => Class::Word,
            ".b64" | ".u64" | ".s64" | ".f64" => Class::Long,
            _ => return Err(self.fail("registers of an unknown type", kind)),
        };
        loop {
            let name = self.word()?;
            let mut count = None;
            if self.accept(b'<') {
                count = Some(self.number()?);
                self.expect(b'>')?;
            }
            let declared = &mut self.body.registers[class as usize];
            self.scopes[self.scope].0.push(Registers {
                name,
                count,
                class,
                first: *declared,
            });
            *declared += count.unwrap_or(1);
            if !self.accept(b',') {
                return self.expect(b';');
            }
        }
    }

    fn array(&mut self, shared: bool) -> Result<(), ParseError> {
        let mut align = 1;
        let mut word = self.word()?;
        if word == ".align" {
            align = self.number()?;
            word = self.word()?;
        }
        let bits: usize = word
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .map_err(|_| self.fail("an array of an unknown type", word))?;
        let name = self.word()?.to_owned();
        let mut count = 1;
        if self.accept(b'[') {
            count = self.number()?;
            self.expect(b']')?;
        }
        self.expect(b';')?;
        let arrays = if shared {
            &mut self.body.shared
        } else {
            &mut self.body.local
        };
        arrays.push((name, count * bits / 8, align.max(bits / 8)));
        Ok(())
    }

    fn label(&mut self, name: &'a str) -> Result<(), ParseError> {
        if let Some(&(_, Token::Word(".branchtargets"))) = self.tokens.peek() {
            self.tokens.next();
            let mut targets = Vec::new();
            while !self.accept(b';') {
                targets.push(self.word()?.to_owned());
                self.accept(b',');
            }
            self.tables.insert(name.to_owned(), targets);
            return Ok(());
        }
        let here = self.body.statements.len();
        self.labels.insert((self.scope, name), here);
        Ok(())
    }

    fn guarded(&mut self) -> Result<(), ParseError> {
        let negated = self.accept(b'!');
        let word = self.word()?;
        let Some((Class::Predicate, index)) = self.register(word) else {
            return Err(self.fail("a guard that is no predicate", word));
        };
        let opcode = self.word()?;
        self.statement(Some((index, negated)), opcode)
    }

    fn statement(&mut self, guard: Option<(u32, bool)>, opcode: &str) -> Result<(), ParseError> {
        let line = self.line;
        let mut operands = Vec::new();
        while !self.accept(b';') {
            operands.push(self.operand()?);
            self.accept(b',');
        }
        self.body.statements.push(Statement {
            line,
            source: self.source,
            guard,
            opcode: opcode.to_owned(),
            operands,
        });
        self.scope_of.push(self.scope);
        Ok(())
    }

    fn register(&self, name: &str) -> Option<(Class, u32)> {
        let mut scope = self.scope;
        loop {
            let mut declared = self.scopes[scope].0.iter().rev();
            if let Some(found) = declared.find_map(|one| one.find(name)) {
                return Some(found);
            }
            if scope == 0 {
                return None;
            }
            scope = self.scopes[scope].1;
        }
    }

    fn operand(&mut self) -> Result<Operand, ParseError> {
        let operand = match self.next()? {
            Token::Mark(b'{') => Operand::List(self.list(b'}')?),
            Token::Mark(b'(') => Operand::List(self.list(b')')?),
            Token::Mark(b'[') => return self.memory(),
            Token::Mark(b'!') => Operand::Not(Box::new(self.operand()?)),
            Token::Mark(b'-') => {
                let word = self.word()?;
                match self.simple(word)? {
                    Operand::Immediate(value) => Operand::Immediate(value.wrapping_neg()),
                    _ => return Err(self.fail("a sign before", word)),
                }
            }
            Token::Word(word) => self.simple(word)?,
            Token::Mark(mark) => {
                return Err(self.fail("an operand that begins with", &(mark as char).to_string()));
            }
        };
        if self.accept(b'|') {
            let other = self.operand()?;
            return Ok(Operand::Pair(Box::new(operand), Box::new(other)));
        }
        Ok(operand)
    }

    fn list(&mut self, end: u8) -> Result<Vec<Operand>, ParseError> {
        let mut list = Vec::new();
        while !self.accept(end) {
            list.push(self.operand()?);
            self.accept(b',');
        }
        Ok(list)
    }

    fn memory(&mut self) -> Result<Operand, ParseError> {
        let base = self.operand()?;
        let mut offset = 0;
        let mut coordinates = Vec::new();
        if self.accept(b'+') {
            match self.operand()? {
                Operand::Immediate(value) => offset = value,
                _ => return Err(self.fail("an offset that is no number", "")),
            }
        } else if self.accept(b',')
            && let Operand::List(list) = self.operand()?
        {
            coordinates = list;
        }
        self.expect(b']')?;
        Ok(Operand::Memory(Box::new(base), offset, coordinates))
    }

    fn simple(&self, word: &str) -> Result<Operand, ParseError> {
        if let Some((class, index)) = self.register(word) {
            return Ok(Operand::Register(class, index));
        }
        if word == "_" {
            return Ok(Operand::Nothing);
        }
        if word.starts_with('%') {
            return Ok(Operand::Special(word.to_owned()));
        }
        if !word.starts_with(|first: char| first.is_ascii_digit()) {
            return Ok(Operand::Name(word.to_owned()));
        }
        let parsed = if let Some(bits) = word.strip_prefix("0f") {
            u32::from_str_radix(bits, 16).ok().map(i64::from)
        } else if let Some(bits) = word.strip_prefix("0d").or(word.strip_prefix("0x")) {
            let bits = bits.trim_end_matches('U');
            u64::from_str_radix(bits, 16).ok().map(|bits| bits as i64)
        } else if let Ok(float) = word.parse::<f32>()
            && word.contains('.')
        {
            Some(i64::from(float.to_bits()))
        } else {
            let digits = word.trim_end_matches('U');
            digits
                .parse::<i64>()
                .ok()
                .or_else(|| digits.parse::<u64>().ok().map(|value| value as i64))
        };
        parsed
            .map(Operand::Immediate)
            .ok_or_else(|| self.fail("a number that is not understood", word))
    }

    fn target(&self, scope: usize, line: u32, name: &str) -> Result<Operand, ParseError> {
        let mut scope = scope;
        loop {
            if let Some(&target) = self.labels.get(&(scope, name)) {
                return Ok(Operand::Target(target));
            }
            if scope == 0 {
                return Err(ParseError::new(line, "a branch to an unknown label", name));
            }
            scope = self.scopes[scope].1;
        }
    }

    fn resolve(mut self) -> Result<Body, ParseError> {
        let mut statements = std::mem::take(&mut self.body.statements);
        for (at, statement) in statements.iter_mut().enumerate() {
            let (scope, line) = (self.scope_of[at], statement.line);
            let fail = || ParseError::new(line, "a branch without a label", &statement.opcode);
            match statement.opcode.as_str() {
                "bra" | "bra.uni" => {
                    let [Operand::Name(name)] = statement.operands.as_slice() else {
                        return Err(fail());
                    };
                    statement.operands = vec![self.target(scope, line, name)?];
                }
                "brx.idx" => {
                    let [index, Operand::Name(table)] = statement.operands.as_slice() else {
                        return Err(fail());
                    };
                    let targets = self.tables.get(table).ok_or_else(fail)?;
                    let targets: Result<Vec<_>, _> = targets
                        .iter()
                        .map(|name| self.target(scope, line, name))
                        .collect();
                    statement.operands = vec![index.clone(), Operand::List(targets?)];
                }
                _ => {}
            }
        }
        self.body.statements = statements;
        Ok(self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Body {
        parse_body(text, 1).unwrap()
    }

    #[test]
    fn scopes_have_their_own_registers_and_labels() {
        let body = parse(
            ".reg .b32 %r<3>;\n{ .reg .pred p; W: setp.ne.b32 p, %r1, 0; @!p bra W; }\n\
             { .reg .pred p; W: setp.ne.b32 p, %r2, 0; @p bra W; }\nret;",
        );
        assert_eq!(body.registers, [2, 3, 0]);
        let [first, jump, second, other, _] = body.statements.as_slice() else {
            panic!()
        };
        assert_eq!(first.operands[0], Operand::Register(Class::Predicate, 0));
        assert_eq!(
            (jump.guard, &jump.operands[0]),
            (Some((0, true)), &Operand::Target(0))
        );
        assert_eq!(second.operands[0], Operand::Register(Class::Predicate, 1));
        assert_eq!(
            (other.guard, &other.operands[0]),
            (Some((1, false)), &Operand::Target(2))
        );
        assert_eq!(body.statements[4].line, 4);
    }

    #[test]
    fn operands_of_all_kinds() {
        let body = parse(
            ".reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>;\n.loc 1 42 7\n\
             x.y [%rd1, {%r1, %r2}], [%r3+-8], _, -5, 0f3F800000, 0x7701U, 7U, %tid.x, %r1|%p1, !%p1;",
        );
        let r = |index| Operand::Register(Class::Word, index);
        let statement = &body.statements[0];
        assert_eq!(statement.source, Some((1, 42)));
        assert_eq!(
            statement.operands,
            [
                Operand::Memory(
                    Box::new(Operand::Register(Class::Long, 1)),
                    0,
                    vec![r(1), r(2)]
                ),
                Operand::Memory(Box::new(r(3)), -8, vec![]),
                Operand::Nothing,
                Operand::Immediate(-5),
                Operand::Immediate(0x3F80_0000),
                Operand::Immediate(0x7701),
                Operand::Immediate(7),
                Operand::Special("%tid.x".into()),
                Operand::Pair(
                    Box::new(r(1)),
                    Box::new(Operand::Register(Class::Predicate, 1))
                ),
                Operand::Not(Box::new(Operand::Register(Class::Predicate, 1))),
            ]
        );
    }

    #[test]
    fn a_branch_to_nowhere_is_an_error_with_its_line() {
        let error = parse_body("ret;\nbra NOWHERE;", 10).unwrap_err();
        assert_eq!(error.line, 11);
    }
}
