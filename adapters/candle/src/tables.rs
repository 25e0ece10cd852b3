//! Block tables and lengths, from vectors or from tensors.

use candle_core::{DType, Result, Tensor, bail};
use tandem_attn::problem::{Integer, PageTable};

use crate::wrap;

/// The blocks of each request, in order: rows of any integer type, one per request, or a tensor
/// `[requests, most_blocks]` of U32, I32 or I64. Rows may be longer than needed: entries after the blocks in use, such
/// as padding, are ignored.
pub trait BlockTables {
    /// Appends the blocks of each request for as many keys as `lengths` states.
    ///
    /// # Errors
    /// If the numbers of requests differ, a row is too short, or an entry is not a valid block number.
    fn push_to(&self, table: &mut PageTable, lengths: &[u32]) -> Result<()>;
}

/// Numbers of tokens, one per request, or one more if they are cumulative: of any integer type, or a one-dimensional
/// tensor of U32, I32 or I64.
pub trait Lengths {
    /// Copies the numbers to host memory. For a tensor on a GPU, this waits for the device.
    ///
    /// # Errors
    /// If a number does not fit 32 bits, or a tensor has another type or shape.
    fn to_host(&self) -> Result<Vec<u32>>;
}

fn push_rows<'a, I: Integer + 'a>(
    rows: impl ExactSizeIterator<Item = &'a [I]>,
    table: &mut PageTable,
    lengths: &[u32],
) -> Result<()> {
    if rows.len() != lengths.len() {
        bail!(
            "there are {} block tables and {} lengths: each request has one of both",
            rows.len(),
            lengths.len()
        );
    }
    for (row, &len) in rows.zip(lengths) {
        table.try_push(row, len).map_err(wrap)?;
    }
    Ok(())
}

impl<I: Integer> BlockTables for [Vec<I>] {
    fn push_to(&self, table: &mut PageTable, lengths: &[u32]) -> Result<()> {
        push_rows(self.iter().map(Vec::as_slice), table, lengths)
    }
}

impl<I: Integer> BlockTables for Vec<Vec<I>> {
    fn push_to(&self, table: &mut PageTable, lengths: &[u32]) -> Result<()> {
        self.as_slice().push_to(table, lengths)
    }
}

impl<I: Integer, const N: usize> BlockTables for [Vec<I>; N] {
    fn push_to(&self, table: &mut PageTable, lengths: &[u32]) -> Result<()> {
        self.as_slice().push_to(table, lengths)
    }
}

impl BlockTables for Tensor {
    fn push_to(&self, table: &mut PageTable, lengths: &[u32]) -> Result<()> {
        let (requests, width) = self.dims2()?;
        let ids = integers(self)?;
        let rows = (0..requests).map(|row| &ids[row * width..(row + 1) * width]);
        push_rows(rows, table, lengths)
    }
}

impl<I: Integer> Lengths for [I] {
    fn to_host(&self) -> Result<Vec<u32>> {
        let narrow = |length: &I| match u32::try_from(length.value()) {
            Ok(length) => Ok(length),
            Err(_) => bail!("{} is no number of tokens", length.value()),
        };
        self.iter().map(narrow).collect()
    }
}

impl<I: Integer> Lengths for Vec<I> {
    fn to_host(&self) -> Result<Vec<u32>> {
        self.as_slice().to_host()
    }
}

impl<I: Integer, const N: usize> Lengths for [I; N] {
    fn to_host(&self) -> Result<Vec<u32>> {
        self.as_slice().to_host()
    }
}

impl Lengths for Tensor {
    fn to_host(&self) -> Result<Vec<u32>> {
        let _ = self.dims1()?;
        integers(self)?.to_host()
    }
}

/// Refuses tensors that are not of integers, on the CPU and on GPUs.
pub fn check_integers(tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::I64 | DType::U32 | DType::I32 => Ok(()),
        other => {
            bail!("a tensor of {other:?} has no numbers of blocks or tokens: give U32, I32 or I64")
        }
    }
}

/// Copies the elements of an integer tensor to host memory.
pub fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    check_integers(tensor)?;
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::U32 => flat.to_vec1::<u32>()?.into_iter().map(i64::from).collect(),
        DType::I32 => flat.to_vec1::<i32>()?.into_iter().map(i64::from).collect(),
        _ => flat.to_vec1()?,
    })
}
