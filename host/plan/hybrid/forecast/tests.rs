//! Forecasts of tiles in rounds, and the choice of the shortest.

use super::*;
use crate::plan::{data::PodMode, model::DeviceDescription};

fn h200() -> (PodDescription, u32) {
    let device = DeviceDescription::named("h200").unwrap();
    (device.pod, device.sms)
}

/// Tiles that take this long on the whole device.
fn load(ns: f64, tiles: u32) -> PrefillLoad {
    let mut load = PrefillLoad::new(true);
    load.add(0, tiles, ns * 132.0 / f64::from(tiles.max(1)));
    load
}

#[test]
fn tiles_take_rounds() {
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b.max(1.0), "{a}, not {b}");
    near(load(100e3, 264).whole(132), 100e3);
    near(load(100e3, 256).whole(132), 100e3 * 264.0 / 256.0);
    near(load(100e3, 264).whole(88), 150e3);
    // One tile on each of half of the SMs takes as long as one on each of all SMs.
    near(load(50e3, 66).whole(132), load(100e3, 132).whole(132));
    near(load(0.0, 0).whole(132), 0.0);
    // A long tile among short ones, and several launches one after the other.
    let mut mixed = load(10e3, 264);
    mixed.add(0, 1, 90e3);
    near(mixed.whole(132), 90e3);
    mixed.add(1, 1, 20e3);
    near(mixed.whole(132), 110e3);
    // If it is cut, the long tile no longer limits the time.
    assert!(mixed.on(132) < 55e3, "{}", mixed.on(132));
}

/// Beside decodes at most two pieces for each CTA are made, so more tiles than CTAs stay whole.
#[test]
fn tiles_of_more_than_a_round_are_not_cut_beside_decodes() {
    let (few, many) = (load(50e3, 66), load(100e3, 140));
    assert!(few.beside(0.0, 132, 1.0) < 60e3);
    assert!(many.on(132) < 110e3);
    let whole = many.whole(132);
    assert!(whole > 180e3 && many.beside(0.0, 132, 1.0) == whole);
}

#[test]
fn the_shortest_forecast_wins() {
    let (pod, sms) = h200();
    let forecast = |prefill: PrefillLoad, decode| {
        let fused = std::iter::once(Some(prefill));
        pod.forecast(sms, &prefill, fused, [decode, decode * pod.decode_alone])
    };
    let (even, _) = forecast(load(400e3, 1024), 400e3);
    assert_eq!(even.best(), PodMode::Fused);
    assert!(even.fused_ns < 0.75 * even.serial_ns && even.fused_ns > even.peak_ns());
    // The prefill takes longer: it gets every SM that saves it a round.
    let (_, choice) = forecast(load(700e3, 512), 400e3);
    let ctas = choice.unwrap().ctas;
    assert!(ctas.prefill >= 128, "{ctas:?}");
    let (_, choice) = forecast(load(700e3, 8192), 400e3);
    assert_eq!(choice.unwrap().ctas, CtaSplit::new(sms, sms));
    // The decodes take longer: they get some SMs for themselves.
    let (_, choice) = forecast(load(120e3, 256), 400e3);
    let ctas = choice.unwrap().ctas;
    assert!(ctas.prefill < sms && ctas.decode > sms, "{ctas:?}");
    // There is nearly nothing to hide.
    let (lopsided, _) = forecast(load(1000e3, 1024), 5e3);
    assert_ne!(lopsided.best(), PodMode::Fused);
    // Prefills on a few of the SMs overlap with decodes.
    let (apart, _) = forecast(load(10e3, 16), 400e3);
    assert_ne!(apart.best(), PodMode::Serial);

    // Tiles for half of the SMs are cut, if cuts are allowed.
    let half = load(100e3, 64);
    let whole = PrefillLoad {
        divisible: false,
        ..half
    };
    let serial = |prefill| forecast(prefill, 50e3).0.serial_ns;
    assert!(serial(half) < serial(whole) - 80e3);

    let none = PodDescription::default();
    let (forecast, choice) = none.forecast(sms, &load(1.0, 1), std::iter::empty(), [1.0; 2]);
    assert_eq!((forecast.best(), choice), (PodMode::Serial, None));
}

#[test]
fn devices_of_any_size_have_a_forecast() {
    let (pod, _) = h200();
    for sms in (1..10).chain([132, 10_000]) {
        for tiles in [0, 1, 7, 64, 1 << 20] {
            let load = load(1e3, tiles);
            let fused = std::iter::once(Some(load));
            let (forecast, choice) = pod.forecast(sms, &load, fused, [1e3; 2]);
            assert!(forecast.fused_ns.is_finite());
            let ctas = choice.unwrap().ctas;
            assert!((1..=sms).contains(&ctas.prefill), "{ctas:?} of {sms}");
        }
    }
}

#[test]
fn shares_lie_between_those_measured() {
    let (pod, sms) = h200();
    let config = &pod.configs[0];
    assert!(config.shares.is_sorted_by(|a, b| a.part < b.part));
    assert_eq!(config.share(1, sms).prefill, config.shares[0].prefill);
    assert_eq!(config.share(sms, sms), *config.shares.last().unwrap());
    for two in config.shares.windows(2) {
        let ctas = (f64::from(sms) * (two[0].part + two[1].part) / 2.0) as u32;
        let prefill = config.share(ctas, sms).prefill;
        let [low, high] = [two[0].prefill, two[1].prefill];
        assert!((low.min(high)..=low.max(high)).contains(&prefill), "{ctas}");
    }
}
