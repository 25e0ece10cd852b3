//! Executes tensor core instructions: products of warps and of warpgroups, loads and stores of fragments.

use std::sync::LazyLock;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{
    Flow, Run,
    access::{At, Touch},
    operand,
    scalar::wide,
    together,
};
use crate::{
    Swizzle,
    block::Block,
    op::{Add, Element, Op, OperandA, Row, Space, Wgmma},
    report::{Fault, Step},
    shadow::Record,
    timeline::{Beside, Flight, product_steps},
    warp::{ALL, LOADING, Wait, Warp},
};

/// The values of all e4m3 floats in a table, because a product needs thousands.
static E4M3: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|bits| f16::from_bits(wide(bits as u8)).to_f32()));

fn float(element: Element, bits: u16) -> f32 {
    match element {
        Element::F16 => f16::from_bits(bits).to_f32(),
        Element::Bf16 => bf16::from_bits(bits).to_f32(),
        Element::E4m3 => E4M3[usize::from(bits as u8)],
    }
}

/// The elements of 16 bytes: 8 or 16.
fn floats(element: Element, bytes: &[u8; 16]) -> [f32; 16] {
    let mut values = [0.0; 16];
    let halves = bytes.as_chunks::<2>().0;
    match element {
        Element::F16 => {
            let halves: [f16; 8] = std::array::from_fn(|at| f16::from_le_bytes(halves[at]));
            halves.convert_to_f32_slice(&mut values[..8]);
        }
        Element::Bf16 => {
            for (value, half) in values.iter_mut().zip(halves) {
                *value = bf16::from_le_bytes(*half).to_f32();
            }
        }
        Element::E4m3 => {
            let table = &*E4M3;
            values = bytes.map(|byte| table[usize::from(byte)]);
        }
    }
    values
}

fn pair(element: Element, bits: u32) -> [f32; 2] {
    [
        float(element, bits as u16),
        float(element, (bits >> 16) as u16),
    ]
}

impl Run<'_> {
    pub(super) fn matrix_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        together(warp, mask)?;
        match op {
            Op::Mma {
                element,
                d,
                a,
                b,
                c,
            } => {
                let parts = [(a[0], 0, 0), (a[1], 8, 0), (a[2], 0, 8), (a[3], 8, 8)];
                mma(warp, *element, d, &parts, &[(b[0], 0), (b[1], 8)], c)?;
            }
            Op::Mma8 {
                element,
                d,
                a,
                b,
                c,
            } => {
                mma(
                    warp,
                    *element,
                    d,
                    &[(a[0], 0, 0), (a[1], 8, 0)],
                    &[(*b, 0)],
                    c,
                )?;
            }
            Op::LoadMatrix {
                transposed,
                d,
                address,
            } => {
                let places = self.addresses(warp, mask, Space::Shared, address)?;
                let record = self.record(block, warp);
                let mut rows = [[0_u16; 8]; 32];
                let mut written = [0_u32; 32];
                for lane in 0..8 * d.len() {
                    Self::aligned(places[lane], 16)?;
                    let mut data = [0; 16];
                    written[lane] = self.read(
                        block,
                        warp,
                        touch(lane, places[lane], record, false),
                        &mut data,
                    )?;
                    rows[lane] = std::array::from_fn(|at| {
                        u16::from_le_bytes([data[2 * at], data[2 * at + 1]])
                    });
                }
                for (matrix, &row) in d.iter().enumerate() {
                    let rows = &rows[8 * matrix..][..8];
                    let written = &written[8 * matrix..][..8];
                    let has = |row: usize, at: usize| written[row] >> (2 * at) & 3 == 3;
                    let valid = (0..32).filter(|&lane| {
                        let (g, t) = (lane / 4, lane % 4 * 2);
                        if *transposed {
                            has(t, g) && has(t + 1, g)
                        } else {
                            has(g, t) && has(g, t + 1)
                        }
                    });
                    let valid = valid.map(|lane| 1 << lane).sum();
                    let out = std::array::from_fn(|lane| {
                        let (g, t) = (lane / 4, lane % 4 * 2);
                        let (low, high) = match transposed {
                            false => (rows[g][t], rows[g][t + 1]),
                            true => (rows[t][g], rows[t + 1][g]),
                        };
                        u32::from(high) << 16 | u32::from(low)
                    });
                    warp.set_word(row, mask, &out, valid)?;
                }
                let lines = (0..8 * d.len()).map(|lane| (places[lane], lane));
                Self::note_load(warp, lines, 16, d);
            }
            Op::StoreMatrix {
                transposed,
                values,
                address,
            } => {
                let places = self.addresses(warp, mask, Space::Shared, address)?;
                let record = self.record(block, warp);
                for (matrix, &row) in values.iter().enumerate() {
                    let valid = warp.valid(row, mask)?;
                    let words = *warp.word(row);
                    let half = |lane: usize, high: usize| (words[lane] >> (16 * high)) as u16;
                    for line in 0..8 {
                        let lane = 8 * matrix + line;
                        Self::aligned(places[lane], 16)?;
                        let mut data = [0; 16];
                        let mut written = 0;
                        for at in 0..8 {
                            let (from, high) = match transposed {
                                false => (line * 4 + at / 2, at % 2),
                                true => (at * 4 + line / 2, line % 2),
                            };
                            let value = half(from, high);
                            written |= (valid >> from & 1) * (3 << (2 * at));
                            data[2 * at..2 * at + 2].copy_from_slice(&value.to_le_bytes());
                        }
                        let written = if written == 0xFFFF { ALL } else { written };
                        self.write(
                            block,
                            warp,
                            touch(lane, places[lane], record, true),
                            &data,
                            written,
                        )?;
                    }
                }
            }
            Op::MoveMatrix { d, a } => {
                let valid = warp.valid(*a, mask)?;
                let words = *warp.word(*a);
                let half = |row: usize, column: usize| {
                    words[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFF
                };
                let out = std::array::from_fn(|lane| {
                    let (g, t) = (lane / 4, lane % 4 * 2);
                    half(t + 1, g) << 16 | half(t, g)
                });
                let has = |row: usize, column: usize| valid >> (row * 4 + column / 2) & 1 != 0;
                let lanes = (0..32).filter(|&lane: &usize| {
                    let (g, t) = (lane / 4, lane % 4 * 2);
                    has(t, g) && has(t + 1, g)
                });
                let valid = lanes.map(|lane| 1 << lane).sum();
                warp.set_word(*d, mask, &out, valid)?;
            }
            Op::Wgmma(product) => self.wgmma(block, warp, product)?,
            Op::WgmmaFence => {
                warp.product_fences += 1;
                warp.fenced_products = true;
            }
            Op::WgmmaCommit => warp.products += 1,
            Op::WgmmaWait { pending } => {
                let done = (warp.products - 1).saturating_sub(*pending);
                let of_done = warp.product_steps.iter().filter(|one| one.0 <= done);
                if let Some(step) = of_done
                    .map(|one| one.1)
                    .max()
                    .filter(|&step| step > self.now)
                {
                    return Ok(Flow::Wait(Wait::Step(step)));
                }
                warp.product_steps.retain(|one| one.0 > done);
                warp.products_done = warp.products_done.max(done);
                let done = warp.products_done;
                warp.product_lines.retain(|&(group, _)| group > done);
                warp.fenced_products = false;
            }
            _ => unreachable!(),
        }
        Ok(Flow::Next)
    }

    fn wgmma(&mut self, block: &mut Block, warp: &mut Warp, product: &Wgmma) -> Step {
        let group = warp.products;
        if let Some(recorder) = &mut self.recorder {
            // Products run one after the other.
            let last = warp.product_steps.last().map_or(0, |one| one.1);
            let end = last.max(self.now) + product_steps(product.n);
            warp.product_steps.push((group, end));
            if recorder.timeline.block as usize == block.id {
                recorder.flight(Flight {
                    warp: warp.index as u32,
                    begin: end - product_steps(product.n),
                    end,
                    what: Beside::Products,
                    amount: u64::from(product.n),
                    line: self.code.lines[self.pc],
                });
            }
        }
        if let Err((first, other)) = block.products[warp.index / 4].issue(warp.index, self.pc) {
            let place = self.place(first, block.id, format!("warp {other}"));
            let what = format!("another one is the next: {place}");
            return Err(Box::new(Fault::OtherProduct { what }));
        }
        if !warp.fenced_products {
            return Err(Box::new(Fault::NoProductFence {
                what: "registers, since the last wait,",
            }));
        }
        let adds = match product.add {
            Add::Always => true,
            Add::Never => false,
            Add::If(row) => {
                let bits = warp.p[row as usize];
                if bits != 0 && bits != ALL {
                    return Err(operand("scale-d differs between lanes".into()));
                }
                bits != 0
            }
        };
        let record = Record::new(
            block.id,
            warp.layout.products(),
            group,
            self.pc,
            self.launch,
        )
        .asynchronous();
        let n = product.n as usize;
        let element = product.element;
        // Elements in a step of the contraction (32 bytes), and in a 16-byte unit of an operand's contiguous dimension.
        let (depth, per_unit) = (32 / element.bytes(), 16 / element.bytes());
        let of_element = |written: u32, at: usize| {
            let bytes = (1 << element.bytes()) - 1;
            written >> (at * element.bytes()) & bytes == bytes
        };
        let b = self.descriptor(warp, product.b)?;
        let mut columns = vec![[0_f32; 32]; n];
        let mut columns_valid = vec![true; n];
        let transposed = product.transposed_b;
        let (lines, per_line) = if transposed { (depth, n) } else { (n, depth) };
        let per_line = per_line / per_unit;
        let offsets =
            (0..lines * per_line).map(|at| b.place(transposed, at / per_line, at % per_line));
        let units = self.read_units(block, warp, record, offsets)?;
        for (at, (bytes, written)) in units.iter().enumerate() {
            let (line, first) = (at / per_line, at % per_line * per_unit);
            let values = floats(element, bytes);
            let values = &values[..per_unit];
            if transposed {
                for (at, &value) in values.iter().enumerate() {
                    columns[first + at][line] = value;
                    columns_valid[first + at] &= of_element(*written, at);
                }
            } else {
                columns[line][first..first + per_unit].copy_from_slice(values);
                columns_valid[line] &= written & 0xFFFF == 0xFFFF;
            }
        }
        // The rows of this warp: 16 of the 64.
        let mut rows = [[0_f32; 32]; 16];
        let mut rows_valid = [true; 16];
        match &product.a {
            OperandA::Shared(row, transposed) => {
                let a = self.descriptor(warp, *row)?;
                let first = warp.index % 4 * 16;
                let lines = if *transposed { depth } else { rows.len() };
                let offsets = (0..2 * lines).map(|at| match transposed {
                    true => a.place(true, at / 2, first / 8 + at % 2),
                    false => a.place(false, first + at / 2, at % 2),
                });
                let units = self.read_units(block, warp, record, offsets)?;
                for (at, (bytes, written)) in units.iter().enumerate() {
                    let (line, unit) = (at / 2, at % 2);
                    let values = floats(element, bytes);
                    if *transposed {
                        for (at, &value) in values[..8].iter().enumerate() {
                            rows[unit * 8 + at][line] = value;
                            rows_valid[unit * 8 + at] &= of_element(*written, at);
                        }
                    } else {
                        rows[line][unit * per_unit..][..per_unit]
                            .copy_from_slice(&values[..per_unit]);
                        rows_valid[line] &= written & 0xFFFF == 0xFFFF;
                    }
                }
            }
            OperandA::Registers(fragment) => {
                let in_word = 4 / element.bytes();
                for (at, &row) in fragment.iter().enumerate() {
                    let valid = warp.valid(row, ALL)?;
                    if warp.w_meta[row as usize].born >= warp.product_fences {
                        return Err(Box::new(Fault::NoProductFence { what: "A" }));
                    }
                    for lane in 0..32 {
                        let (g, t) = (lane / 4, lane % 4 * in_word);
                        let word = warp.word(row)[lane];
                        let (line, k) = (g + at % 2 * 8, t + at / 2 * (depth / 2));
                        match element {
                            Element::E4m3 => {
                                let four = word.to_le_bytes().map(|byte| E4M3[usize::from(byte)]);
                                rows[line][k..k + 4].copy_from_slice(&four);
                            }
                            _ => rows[line][k..k + 2].copy_from_slice(&pair(element, word)),
                        }
                        rows_valid[line] &= valid >> lane & 1 != 0;
                    }
                    warp.w_meta[row as usize].read_by = group;
                }
            }
        }
        for (at, &row) in product.d.iter().enumerate() {
            if adds && warp.w_meta[row as usize].product & LOADING != 0 {
                warp.valid(row, ALL)?;
            }
            let meta = warp.w_meta[row as usize];
            let mut valid = ALL;
            if adds {
                // A product may add to the result of an earlier product that is still running.
                valid = meta.then;
                if meta.product <= warp.products_done {
                    valid = warp.valid(row, ALL)?;
                    if meta.born >= warp.product_fences {
                        return Err(Box::new(Fault::NoProductFence {
                            what: "the accumulator",
                        }));
                    }
                }
            } else if meta.read_by > warp.products_done {
                return Err(Box::new(Fault::Operand {
                    what: "the accumulator is A of a product that may still run".into(),
                }));
            }
            let (column, high) = (at / 4 * 8 + at % 2, at % 4 / 2 * 8);
            let d = &mut warp.w[row as usize];
            for (lane, value) in d.iter_mut().enumerate() {
                let (line, column) = (lane / 4 + high, column + lane % 4 * 2);
                let before = if adds { f32::from_bits(*value) } else { 0.0 };
                let (a, b) = (&rows[line], &columns[column]);
                let sum = match element {
                    Element::E4m3 => dot_of_8_bits(before, a, b),
                    _ => before + dot(first_16(a), first_16(b)),
                };
                *value = sum.to_bits();
                valid &= !(u32::from(!rows_valid[line] || !columns_valid[column]) << lane);
            }
            let meta = &mut warp.w_meta[row as usize];
            (meta.product, meta.valid, meta.then, meta.born) = (group, 0, valid, 0);
        }
        if warp
            .product_lines
            .last()
            .is_none_or(|&(last, _)| last != group)
        {
            warp.product_lines.push((group, self.code.lines[self.pc]));
        }
        Ok(())
    }

    fn descriptor(&self, warp: &Warp, row: Row) -> Step<Descriptor> {
        let (values, valid) = (warp.long(row), warp.long_valid(row));
        if valid != ALL || values.iter().any(|&value| value != values[0]) {
            return Err(operand(
                "the descriptor is not the same in all lanes".into(),
            ));
        }
        Descriptor::new(values[0])
    }
}

fn touch(lane: usize, at: At, record: Record, write: bool) -> Touch {
    let what = if write { "writes" } else { "reads" };
    Touch {
        lane,
        at,
        len: 16,
        record,
        member: lane,
        write,
        asynchronous: false,
        same_value: false,
        what,
    }
}

/// A step of the contraction in 16-bit elements.
fn first_16(of: &[f32; 32]) -> &[f32; 16] {
    of.first_chunk().expect("there are 32")
}

fn dot(a: &[f32; 16], b: &[f32; 16]) -> f32 {
    let mut parts = [0_f32; 4];
    // Four at a time, side by side.
    let (a, b) = (a.as_chunks::<4>().0, b.as_chunks::<4>().0);
    for (a, b) in a.iter().zip(b) {
        for (part, (a, b)) in parts.iter_mut().zip(a.iter().zip(b)) {
            *part += a * b;
        }
    }
    parts[0] + parts[1] + (parts[2] + parts[3])
}

/// Number of bits below the largest term that Hopper keeps in a sum of 8-bit products.
const KEPT: i32 = 13;

/// A·B + C with 8-bit products as on Hopper: every term and the sum are truncated [`KEPT`] bits below the largest term.
/// (The report on DeepSeek-V3 describes this; sums of 16-bit products are f32.)
fn dot_of_8_bits(c: f32, a: &[f32; 32], b: &[f32; 32]) -> f32 {
    let mut products = [0_f32; 32];
    // Magnitudes are ordered as their bits are: NaN is above infinity, which is above all others.
    let magnitude = |x: f32| (x.to_bits() & (u32::MAX >> 1)) as i32;
    let mut most = magnitude(c);
    for (product, (a, b)) in products.iter_mut().zip(a.iter().zip(b)) {
        *product = a * b;
        most = most.max(magnitude(*product));
    }
    let exponent = most >> 23;
    // Infinities, NaN, and exponents at the ends of the range. All other sums are finite.
    if exponent <= KEPT || exponent >= 254 - KEPT {
        return c + products.iter().sum::<f32>();
    }
    let power = |exponent: i32| f32::from_bits((exponent as u32) << 23);
    let (unit, units) = (power(exponent - KEPT), power(254 - exponent + KEPT));
    let mut sum = (c * units) as i32;
    for product in products {
        sum += (product * units) as i32;
    }
    // The sum of 33 terms of 14 bits is exact in f32.
    let bits = (sum as f32 * unit).to_bits();
    f32::from_bits(bits & (u32::MAX << (23 - KEPT)))
}

/// D = A·B + C of a warp. Each part of A consists of its words, its first row and its first column.
fn mma(
    warp: &mut Warp,
    element: Element,
    d: &[Row; 4],
    a: &[(Row, usize, usize)],
    b: &[(Row, usize)],
    c: &[Row; 4],
) -> Step {
    let (mut rows, mut columns) = ([[0_f32; 16]; 16], [[0_f32; 16]; 8]);
    let (mut rows_valid, mut columns_valid) = ([true; 16], [true; 8]);
    for &(row, line, k) in a {
        let valid = warp.valid(row, ALL)?;
        for (lane, &word) in warp.word(row).iter().enumerate() {
            rows[lane / 4 + line][k + lane % 4 * 2..][..2].copy_from_slice(&pair(element, word));
            rows_valid[lane / 4 + line] &= valid >> lane & 1 != 0;
        }
    }
    for &(row, k) in b {
        let valid = warp.valid(row, ALL)?;
        for (lane, &word) in warp.word(row).iter().enumerate() {
            columns[lane / 4][k + lane % 4 * 2..][..2].copy_from_slice(&pair(element, word));
            columns_valid[lane / 4] &= valid >> lane & 1 != 0;
        }
    }
    let mut out = [[0_u32; 32]; 4];
    let mut valid = [ALL; 4];
    for (at, &row) in c.iter().enumerate() {
        valid[at] &= warp.valid(row, ALL)?;
        for (lane, &word) in warp.word(row).iter().enumerate() {
            let (line, column) = (lane / 4 + at / 2 * 8, lane % 4 * 2 + at % 2);
            out[at][lane] = (f32::from_bits(word) + dot(&rows[line], &columns[column])).to_bits();
            valid[at] &= !(u32::from(!rows_valid[line] || !columns_valid[column]) << lane);
        }
    }
    for (at, &row) in d.iter().enumerate() {
        warp.replace_word(row, ALL, &out[at], valid[at])?;
    }
    Ok(())
}

/// Location and layout of an operand in shared memory.
pub(super) struct Descriptor {
    start: u32,
    leading: u32,
    stride: u32,
    swizzle: Swizzle,
}

impl Descriptor {
    pub fn new(bits: u64) -> Step<Self> {
        let field = |at: u32| ((bits >> at & 0x3FFF) as u32) << 4;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        if bits >> 49 & 7 != 0 {
            return Err(operand("a descriptor with a base offset".into()));
        }
        Ok(Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
            swizzle,
        })
    }

    /// Shared address of 16 bytes. `line` counts along the dimension that is not contiguous; `unit` counts units of 16
    /// bytes along the contiguous one.
    pub fn place(&self, transposed: bool, line: usize, unit: usize) -> u32 {
        let (line, unit) = (line as u32, unit as u32);
        let per_row = self.swizzle.row_bytes() / 16;
        let offset = match (self.swizzle, transposed) {
            // Core matrices of 8 lines of 16 bytes.
            (Swizzle::None, false) => line / 8 * self.stride + line % 8 * 16 + unit * self.leading,
            (Swizzle::None, true) => line / 8 * self.leading + line % 8 * 16 + unit * self.stride,
            (swizzle, false) => line / 8 * self.stride + line % 8 * swizzle.row_bytes() + unit * 16,
            (swizzle, true) => {
                unit / per_row * self.leading
                    + line / 8 * self.stride
                    + line % 8 * swizzle.row_bytes()
                    + unit % per_row * 16
            }
        };
        // The pattern is a function of the address.
        self.swizzle.apply(self.start + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::dot_of_8_bits;

    #[test]
    fn sums_of_8_bits_keep_13_bits_behind_the_largest_term() {
        let ones = [1.0; 32];
        let sum = |c: f32, first: f32| {
            let mut a = [0.0; 32];
            a[0] = first;
            dot_of_8_bits(c, &a, &ones)
        };
        assert_eq!(dot_of_8_bits(0.0, &ones, &ones), 32.0);
        assert_eq!(sum(4096.0, 0.5), 4096.5);
        assert_eq!(sum(4096.0, 0.25), 4096.0);
        assert_eq!(sum(-4096.0, 0.75), -4095.5);
        // Each term is truncated separately.
        assert_eq!(dot_of_8_bits(8192.0, &[0.75; 32], &ones), 8192.0);
        assert_eq!(dot_of_8_bits(0.0, &[0.0; 32], &ones), 0.0);
        assert!(sum(f32::NAN, 1.0).is_nan() && sum(1.0, f32::NAN).is_nan());
    }
}
