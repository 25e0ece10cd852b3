//! Where a command runs: its flags, and the GPU or the backend that they choose.

#[cfg(feature = "cuda")]
use std::{path::Path, sync::Once};

#[cfg(feature = "cuda")]
pub(crate) use tandem_attn::exec::gpu::Gpu;
#[cfg(feature = "cuda")]
use tandem_attn::{
    Error,
    exec::gpu::{ReplacedModules, modules_of},
};

use super::{Backend, Choice, CpuBackend};
use crate::Failure;
#[cfg(feature = "cuda")]
use crate::{backend::GpuBackend, failure::in_flags, table::visible};

/// The flags of all commands that run on a backend.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Place {
    /// Where to run
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Choice,
    /// If there is no machine code for the GPU, let its driver compile the PTX, which takes a minute or more at the first
    /// start. Without a GPU this is an error
    #[arg(long)]
    pub compile_ptx: bool,
    /// Number of the GPU, as `nvidia-smi -L` and CUDA_VISIBLE_DEVICES count them [default: 0]
    #[arg(long = "gpu", value_name = "NUMBER")]
    pub number: Option<u32>,
}

/// This build supports no GPU.
#[cfg(not(feature = "cuda"))]
pub(crate) type Gpu = std::convert::Infallible;

impl Place {
    /// Opens a backend.
    ///
    /// # Errors
    /// [`Failure::Backend`] if it is not available.
    pub fn open(self) -> Result<Box<dyn Backend>, Failure> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.gpu()? {
            return Ok(Box::new(GpuBackend::on(gpu)?));
        }
        #[cfg(not(feature = "cuda"))]
        self.gpu()?;
        Ok(Box::new(CpuBackend::new()))
    }

    /// The choice of these flags. Those of GPUs imply one: a GPU that is named is never replaced by the CPU.
    fn choice(self) -> Result<Choice, Failure> {
        let flags = [
            (self.compile_ptx, "--compile-ptx"),
            (self.number.is_some(), "--gpu"),
        ];
        let given = flags.iter().find(|(given, _)| *given);
        match (self.backend, given) {
            (Choice::Emulated, _) => Err(emulated()),
            (Choice::Auto, Some(_)) => Ok(Choice::Gpu),
            (Choice::Cpu, Some((_, flag))) => Err(Failure::Input(format!(
                "{flag} is for GPUs: leave it out, or give --backend gpu"
            ))),
            (choice, _) => Ok(choice),
        }
    }

    /// The GPU, or none for the CPU. A GPU that is there and cannot be used is an error: a result of the CPU would be taken for one
    /// of the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu(self) -> Result<Option<Gpu>, Failure> {
        let number = self.number.unwrap_or(0);
        match self.choice()? {
            Choice::Gpu => Ok(Some(self.open_gpu(number)?)),
            Choice::Auto => if_there(self.open_gpu(number)),
            Choice::Cpu | Choice::Emulated => Ok(None),
        }
    }

    #[cfg(not(feature = "cuda"))]
    pub(crate) fn gpu(self) -> Result<Option<Gpu>, Failure> {
        match self.choice()? {
            Choice::Gpu => Err(crate::failure::built_without(
                "support for GPUs",
                "cuda",
                ", or use --backend cpu",
            )),
            Choice::Auto | Choice::Cpu | Choice::Emulated => Ok(None),
        }
    }

    /// A GPU by its number, with the kernels of the folder in [`MODULES_VARIABLE`] in the place of the program's. What its
    /// driver compiles is reported on standard error.
    #[cfg(feature = "cuda")]
    pub(crate) fn open_gpu(self, ordinal: u32) -> Result<Gpu, Error> {
        let replaced = replaced_modules()?;
        let mut progress = |compiling| eprintln!("{compiling}");
        let mut builder = Gpu::builder();
        if let Some(replaced) = &replaced {
            builder = builder.modules(&replaced.modules);
        }
        if self.compile_ptx {
            builder = builder.compile_ptx(&mut progress);
        }
        builder.build(ordinal)
    }
}

/// The variable with a folder of kernels that replace those in the program.
pub(crate) const MODULES_VARIABLE: &str = "TANDEM_MODULES";

/// The kernels of the folder that [`MODULES_VARIABLE`] names. Standard error gets one line that says which, once.
#[cfg(feature = "cuda")]
fn replaced_modules() -> Result<Option<ReplacedModules>, Error> {
    static TOLD: Once = Once::new();
    let Some(folder) = std::env::var_os(MODULES_VARIABLE) else {
        return Ok(None);
    };
    let folder = Path::new(&folder);
    let replaced = modules_of(folder)?;
    TOLD.call_once(|| {
        let (names, folder) = (replaced.names.join(", "), folder.display().to_string());
        eprintln!(
            "{MODULES_VARIABLE}: kernels of {} in the place of the program's: {names}",
            visible(&folder, false)
        );
    });
    Ok(Some(replaced))
}

#[cfg(feature = "cuda")]
fn if_there<T>(gpu: Result<T, Error>) -> Result<Option<T>, Failure> {
    match gpu {
        Ok(gpu) => Ok(Some(gpu)),
        Err(Error::NoDriver { .. } | Error::NoDevice { .. }) => Ok(None),
        Err(error @ Error::NoModules { .. }) => Err(error.into()),
        Err(error) => Err(Failure::Backend(format!(
            "{}; --backend cpu does not use the GPU",
            in_flags(&error.to_string())
        ))),
    }
}

/// The error of commands that do not run on the emulator: no time on it means anything, and steps take minutes.
fn emulated() -> Failure {
    Failure::Input(
        "only `tandem trace` (--features emulator) runs on an emulated GPU, and draws what kernels do there: give \
         --backend cpu or gpu"
            .to_owned(),
    )
}

/// The failure of a run on a GPU. Commands with the flags of [`Place`] can use the CPU instead, which computes everything.
#[cfg(feature = "cuda")]
pub(super) fn of_gpu(error: Error) -> Failure {
    match error {
        Error::NoInstance { .. } => {
            Failure::Input(format!("{error}; the CPU supports all: give --backend cpu"))
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiling_and_numbers_are_for_gpus() {
        for (compile_ptx, number) in [(true, None), (false, Some(0))] {
            let choice = |backend| {
                let place = Place {
                    backend,
                    compile_ptx,
                    number,
                };
                place.choice()
            };
            assert_eq!(choice(Choice::Auto).unwrap(), Choice::Gpu);
            let failure = choice(Choice::Cpu).unwrap_err();
            assert!(matches!(failure, Failure::Input(_)), "{failure:?}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_cpu_does_not_stand_in_for_a_gpu_that_fails() {
        let absent = Error::NoDevice {
            ordinal: 0,
            count: 0,
        };
        assert_eq!(if_there::<()>(Err(absent)).unwrap(), None);
        let wrong = Error::NoModules {
            file: "kernels".into(),
            reason: "it has no kernels".to_owned(),
        };
        let failure = if_there::<()>(Err(wrong)).unwrap_err();
        assert!(matches!(failure, Failure::Input(_)), "{failure:?}");
        let old = Error::UnsupportedArchitecture {
            device: "T4".to_owned(),
            compute: (7, 5),
            built_for: vec!["sm_90a"],
        };
        let failure = if_there::<()>(Err(old)).unwrap_err();
        assert!(matches!(failure, Failure::Backend(_)));
        assert!(failure.to_string().contains("--backend cpu"), "{failure}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn heads_without_kernels_are_wrong_input_for_a_gpu() {
        let failure = of_gpu(Error::NoInstance {
            kernel: "decode",
            asked: "head dimension 80".to_owned(),
            there: "64, 128, 256",
        });
        assert_eq!(
            failure.to_string(),
            "no decode kernel supports head dimension 80; supported: 64, 128, 256; the CPU supports all: give --backend cpu"
        );
        assert!(matches!(failure, Failure::Input(_)));
    }
}
