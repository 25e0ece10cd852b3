//! What the emulator computed, in a file.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use tandem_attn::problem::Dtype;

use super::launches::Output;

/// What a task wrote.
pub struct Record {
    pub name: String,
    pub outputs: Vec<Output>,
}

/// Bytes of an output that are kept.
const KEPT: usize = 1 << 13;

impl Output {
    /// As it is compared: of many numbers a part, of many bits a digest.
    pub fn recorded(mut self) -> Self {
        if self.bytes.len() <= KEPT {
            return self;
        }
        self.bytes = match self.dtype {
            Some(dtype) => {
                let size = dtype.bytes() as usize;
                // An odd step meets all columns of rows of any usual length.
                let step = (self.bytes.len() / KEPT) | 1;
                let kept = self.bytes.chunks(size).step_by(step);
                kept.flatten().copied().collect()
            }
            None => digest(&self.bytes).to_vec(),
        };
        self
    }
}

/// FNV-1a in 64 bits, from both ends.
fn digest(bytes: &[u8]) -> [u8; 16] {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let start = 0xcbf2_9ce4_8422_2325;
    let (ahead, back) = (
        bytes.iter().fold(start, fold),
        bytes.iter().rev().fold(start, fold),
    );
    let both = u128::from(ahead) << 64 | u128::from(back);
    both.to_le_bytes()
}

pub fn file(directory: &Path, part: usize) -> PathBuf {
    directory.join(format!("{part}.recorded"))
}

pub struct Writer(BufWriter<File>);

impl Writer {
    pub fn create(path: &Path) -> io::Result<Self> {
        File::create(path).map(|file| Self(BufWriter::new(file)))
    }

    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(&(bytes.len() as u32).to_le_bytes())?;
        self.0.write_all(bytes)
    }

    pub fn put(&mut self, record: &Record) -> io::Result<()> {
        self.bytes(record.name.as_bytes())?;
        self.0
            .write_all(&(record.outputs.len() as u32).to_le_bytes())?;
        for output in &record.outputs {
            self.bytes(output.name.as_bytes())?;
            let dtype = match output.dtype {
                None => 0,
                Some(Dtype::F32) => 1,
                Some(Dtype::F16) => 2,
                Some(_) => 3,
            };
            self.0.write_all(&[dtype])?;
            self.0.write_all(&output.absolute.to_le_bytes())?;
            self.bytes(&output.bytes)?;
        }
        Ok(())
    }

    /// The end: no name, and the number of launches.
    pub fn finish(mut self, launches: u64) -> io::Result<()> {
        self.bytes(&[])?;
        self.0.write_all(&launches.to_le_bytes())?;
        self.0.flush()
    }
}

/// What all parts wrote.
#[derive(Default)]
pub struct Recorded {
    pub outputs: HashMap<String, Vec<Output>>,
    pub launches: u64,
}

pub fn read_all(directory: &Path) -> io::Result<Recorded> {
    let mut recorded = Recorded::default();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "recorded") {
            recorded.read(&mut BufReader::new(File::open(path)?))?;
        }
    }
    Ok(recorded)
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).map(|()| bytes)
}

fn bytes(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; u32::from_le_bytes(array(from)?) as usize];
    from.read_exact(&mut bytes).map(|()| bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Recorded {
    fn read(&mut self, from: &mut impl Read) -> io::Result<()> {
        loop {
            let name = text(bytes(from)?)?;
            if name.is_empty() {
                self.launches += u64::from_le_bytes(array(from)?);
                return Ok(());
            }
            let count = u32::from_le_bytes(array(from)?);
            let outputs = (0..count).map(|_| output(from));
            self.outputs
                .insert(name, outputs.collect::<Result<_, _>>()?);
        }
    }
}

fn output(from: &mut impl Read) -> io::Result<Output> {
    let name = text(bytes(from)?)?;
    let [dtype] = array(from)?;
    Ok(Output {
        // Lives as long as the test.
        name: name.leak(),
        dtype: [None, Some(Dtype::F32), Some(Dtype::F16), Some(Dtype::BF16)][usize::from(dtype)],
        absolute: f64::from_le_bytes(array(from)?),
        bytes: bytes(from)?,
    })
}
