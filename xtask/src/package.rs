//! Writes the package of compiled kernels, `kernels-bin/`, from which programs take their kernels.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use cuda_builder::CudaModule;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::{Error, kernels, registers, target, unchanged, workspace};

const FOLDER: &str = "kernels-bin";

/// File next to the images with the compilers' versions, and a hash of every image before compression.
const MADE_FROM: &str = "data/made-from.txt";

/// The list of the images.
const TABLE: &str = "src/table.rs";

/// zstd's highest level. Its window of 128 MiB covers a whole module.
const LEVEL: i32 = 22;

/// Maximum size of all packed images: 9.94 MiB. Registries accept packages of 10 MiB, and the rest of this one takes 16
/// KiB.
const LIMIT: usize = 159 << 16;

/// The architecture whose PTX is also that of others if only the target differs: it is in the package once.
const SHARED: &str = "sm_80";

/// Builds all kernels and writes the package, or checks that the existing one was made from these sources.
pub fn run(only_check: bool) -> Result<(), Error> {
    if only_check {
        check(&unchanged::build(&kernels::committed()?)?)
    } else {
        let known = kernels::committed().unwrap_or_default();
        write(&workspace().join(FOLDER), &unchanged::compile(&known)?)
    }
}

/// Checks that the package was made from these modules.
pub fn check(modules: &[CudaModule]) -> Result<(), Error> {
    compare(&workspace().join(FOLDER), modules)
}

/// The bytes of an image in the package, such as `sm_90a.prefill.cubin`.
pub fn committed(file: &str) -> Result<Vec<u8>, Error> {
    let path = |file: &str| workspace().join(FOLDER).join("data").join(packed(file));
    let read = |file: &str| -> Result<Vec<u8>, Error> {
        Ok(zstd::stream::decode_all(fs::File::open(path(file))?)?)
    };
    if !file.ends_with(".ptx") {
        return read(file);
    }
    let shared = shared(file).filter(|_| !path(file).exists());
    let ptx = registers::absolute(&read(shared.as_deref().unwrap_or(file))?)
        .ok_or_else(|| format!("{file}: a register has no number"))?;
    match shared {
        None => Ok(ptx),
        Some(_) => retargeted(&ptx, file).ok_or_else(|| format!("{file}: no target").into()),
    }
}

/// The file of the same family's PTX that other architectures may share; `None` for that file itself.
fn shared(file: &str) -> Option<String> {
    let (arch, family) = file.split_once('.')?;
    (arch != SHARED).then(|| format!("{SHARED}.{family}"))
}

/// PTX for the architecture of a file.
fn retargeted(ptx: &[u8], file: &str) -> Option<Vec<u8>> {
    target::for_target(ptx, file.split_once('.')?.0)
}

/// An image of a module in the package.
struct Image<'a> {
    file: String,
    bytes: Cow<'a, [u8]>,
    /// The file of another architecture's PTX that differs in the target alone.
    shared: Option<String>,
}

impl Image<'_> {
    fn is_ptx(&self) -> bool {
        self.file.ends_with(".ptx")
    }

    /// The file that holds it.
    fn stored(&self) -> String {
        packed(self.shared.as_ref().unwrap_or(&self.file))
    }

    /// The bytes of its file.
    fn packed(&self) -> Result<Vec<u8>, Error> {
        if !self.is_ptx() {
            return compress(&self.bytes);
        }
        let text = registers::relative(&self.bytes)
            .ok_or_else(|| format!("{}: its registers are not numbered as in PTX", self.file))?;
        compress(&text)
    }
}

/// PTX without the lines that are comments: 5 % less in the package.
pub fn without_comments(ptx: &str) -> String {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    ptx.split_inclusive('\n').filter(is_code).collect()
}

fn images(modules: &[CudaModule]) -> Result<Vec<[Image<'_>; 2]>, Error> {
    fn pair(module: &CudaModule) -> Result<[Image<'_>; 2], Error> {
        let name = unchanged::name(module);
        let file = format!("{name}.cubin");
        // A module without one is as the package has it.
        let cubin = match &module.cubin {
            Some(cubin) => cubin.bytes.as_slice().into(),
            None => committed(&file)?.into(),
        };
        Ok([
            Image {
                file,
                bytes: cubin,
                shared: None,
            },
            Image {
                file: format!("{name}.ptx"),
                bytes: without_comments(&module.ptx).into_bytes().into(),
                shared: None,
            },
        ])
    }
    let mut images: Vec<_> = modules.iter().map(pair).collect::<Result<_, Error>>()?;
    let same_as = |[_, ptx]: &[Image<'_>; 2]| {
        let file = shared(&ptx.file)?;
        let [_, other] = images.iter().find(|[_, other]| other.file == file)?;
        let is_same = retargeted(&other.bytes, &ptx.file).is_some_and(|it| it == *ptx.bytes);
        is_same.then_some(file)
    };
    let same: Vec<Option<String>> = images.iter().map(same_as).collect();
    for ([_, ptx], same) in images.iter_mut().zip(same) {
        ptx.shared = same;
    }
    Ok(images)
}

fn made_from(modules: &[CudaModule], images: &[[Image<'_>; 2]]) -> Result<String, Error> {
    let mut text = format!("{}\n{}\n", modules[0].compiler, unchanged::assembler()?);
    for image in images.iter().flatten() {
        writeln!(text, "{:x}  {}", Sha256::digest(&image.bytes), image.file)
            .expect("a string takes all");
    }
    Ok(text)
}

fn write(folder: &Path, modules: &[CudaModule]) -> Result<(), Error> {
    let images = images(modules)?;
    let text = made_from(modules, &images)?;
    let data = folder.join("data");
    fs::create_dir_all(&data)?;
    // Images with unchanged bytes keep their file, because compressing takes longer than hashing.
    let before = fs::read_to_string(folder.join(MADE_FROM)).unwrap_or_default();
    let unchanged = |image: &Image<'_>| {
        let line = format!("{:x}  {}", Sha256::digest(&image.bytes), image.file);
        before.lines().any(|known| known == line) && data.join(packed(&image.file)).is_file()
    };
    let (mut packed_bytes, mut bytes) = (0, 0);
    for image in images.iter().flatten() {
        bytes += image.bytes.len();
        if image.shared.is_some() {
            continue;
        }
        let path = data.join(image.stored());
        if !unchanged(image) {
            fs::write(&path, image.packed()?)?;
        }
        packed_bytes += fs::metadata(&path)?.len() as usize;
    }
    if packed_bytes > LIMIT {
        return Err(
            format!("the kernels take {packed_bytes} bytes packed, the limit is {LIMIT}").into(),
        );
    }
    let wanted: Vec<PathBuf> = images
        .iter()
        .flatten()
        .map(|image| data.join(image.stored()))
        .collect();
    for entry in fs::read_dir(&data)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "zst") && !wanted.contains(&path) {
            fs::remove_file(path)?;
        }
    }
    fs::write(folder.join(TABLE), table(modules, &images))?;
    fs::write(folder.join(MADE_FROM), text)?;
    println!(
        "package: {} modules, {:.2} MiB packed, {:.1} MiB unpacked, in {FOLDER}/data",
        modules.len(),
        packed_bytes as f64 / 1048576.0,
        bytes as f64 / 1048576.0
    );
    Ok(())
}

fn packed(file: &str) -> String {
    format!("{file}.zst")
}

fn compress(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let mut encoder = zstd::bulk::Compressor::new(LEVEL)?;
    encoder.include_checksum(false)?;
    Ok(encoder.compress(bytes)?)
}

/// `kernels-bin/src/table.rs`: an expression of type `&[Module]`.
fn table(modules: &[CudaModule], images: &[[Image<'_>; 2]]) -> String {
    let mut text = String::from("// Written by `cargo xtask package`.\n&[\n");
    let constructor = |image: &Image<'_>, arch: &str| {
        let function = match (image.is_ptx(), image.shared.is_some()) {
            (false, _) => "zstd(".to_owned(),
            (true, false) => "ptx(".to_owned(),
            (true, true) => format!("ptx_for(\n            {arch:?},"),
        };
        format!(
            "Image::{function}\n            include_bytes!(\"../data/{}\"),\n            {},\n        )",
            image.stored(),
            image.bytes.len()
        )
    };
    for (module, [cubin, ptx]) in modules.iter().zip(images) {
        let arch = module.arch.sm();
        write!(
            text,
            "    Module {{\n        arch: {:?},\n        family: {:?},\n        ptx: {},\n        cubin: Some({}),\n    }},\n",
            arch,
            module.name,
            constructor(ptx, arch),
            constructor(cubin, arch)
        )
        .expect("a string takes all");
    }
    text.push_str("]\n");
    text
}

fn compare(folder: &Path, modules: &[CudaModule]) -> Result<(), Error> {
    let recorded = fs::read_to_string(folder.join(MADE_FROM))
        .map_err(|error| format!("cannot read {FOLDER}/{MADE_FROM}: {error}"))?;
    let images = images(modules)?;
    let built = made_from(modules, &images)?;
    let tools = |text: &str| text.lines().take(2).map(str::to_owned).collect::<Vec<_>>();
    if tools(&recorded) != tools(&built) {
        println!(
            "package: {FOLDER} was made by {}, these kernels by {}: hashes are not compared",
            tools(&recorded).join(" and "),
            tools(&built).join(" and ")
        );
        return Ok(());
    }
    let hashes = |text: &str| -> BTreeMap<String, String> {
        let pair = |line: &str| {
            line.split_once("  ")
                .map(|(hash, file)| (file.into(), hash.into()))
        };
        text.lines().skip(2).filter_map(pair).collect()
    };
    let (recorded, built) = (hashes(&recorded), hashes(&built));
    let mut differ: Vec<&String> = built
        .iter()
        .filter(|(file, hash)| recorded.get(*file) != Some(hash))
        .map(|(file, _)| file)
        .collect();
    differ.extend(recorded.keys().filter(|file| !built.contains_key(*file)));
    if !differ.is_empty() {
        return Err(format!(
            "{FOLDER} is not made from these sources, `cargo xtask package` makes it again; different: {}",
            differ.iter().map(|file| file.as_str()).collect::<Vec<_>>().join(", ")
        )
        .into());
    }
    if fs::read_to_string(folder.join(TABLE))? != table(modules, &images) {
        return Err(format!("{FOLDER}/{TABLE} is not that of these images").into());
    }
    // The hashes are right; the files may still be those of another build, after a merge for example.
    let stale = |image: &&Image<'_>| !committed(&image.file).is_ok_and(|it| *it == *image.bytes);
    if let Some(image) = images.par_iter().flatten_iter().find_any(stale) {
        return Err(format!(
            "{FOLDER}/data/{} is not what {MADE_FROM} says",
            image.stored()
        )
        .into());
    }
    println!(
        "package: {} images are as {FOLDER}/{MADE_FROM} says",
        built.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressing_twice_gives_the_same_bytes() {
        let bytes: Vec<u8> = (0..100_000_u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        let packed = compress(&bytes).unwrap();
        assert!(packed.len() < bytes.len());
        assert_eq!(packed, compress(&bytes).unwrap());
    }
}
