{{/* What are the release's objects called, and how are its pods told from others? */}}

{{- define "refill.name" -}}
{{ include "refill.shortened" (list (.Values.nameOverride | default .Chart.Name) 63) }}
{{- end }}

{{/* At most 52: a StatefulSet's pods carry a label NAME-HASH of 63 letters, with 10 for the hash. */}}
{{- define "refill.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $chosen := .Values.fullnameOverride | default $full -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $chosen) -}}
{{- fail (printf "a release called %s: no Service can be called %s; set fullnameOverride to a name of a-z, 0-9 and -, with a letter first" .Release.Name $chosen) -}}
{{- end -}}
{{ include "refill.shortened" (list $chosen 52) }}
{{- end }}

{{/* (name, most): what is cut off is told apart by a hash, or long names of two releases could become one. */}}
{{- define "refill.shortened" -}}
{{- $name := index . 0 -}}
{{- $most := index . 1 -}}
{{- if gt (len $name) $most -}}
{{ printf "%s-%s" (trunc (int (sub $most 9)) $name | trimSuffix "-" | trimSuffix ".") (sha256sum $name | trunc 8) }}
{{- else -}}
{{ $name }}
{{- end -}}
{{- end }}

{{/* (root, namespace): of what may lie in a namespace that releases of several share, such as the one that Prometheus looks into.
No namespace has a dot in its name, so that no two releases have one name. For `helm lint` there may be none. */}}
{{- define "refill.nameIn" -}}
{{- $root := index . 0 -}}
{{- $name := include "refill.fullname" $root -}}
{{- if has (index . 1 | default "") (list "" $root.Release.Namespace) -}}
{{ $name }}
{{- else -}}
{{ include "refill.shortened" (list (printf "%s.%s" $root.Release.Namespace $name | trimPrefix ".") 63) }}
{{- end -}}
{{- end }}

{{- define "refill.peersName" -}}
{{ include "refill.fullname" . }}-peers
{{- end }}

{{- define "refill.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "refill.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* Of cache pods only; the pod of `helm test` has another component. */}}
{{- define "refill.podSelector" -}}
app.kubernetes.io/name: {{ include "refill.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: cache
{{- end }}

{{/* Of every object. What the chart sets itself stays as it is. */}}
{{- define "refill.labels" -}}
{{- $own := dict
    "app.kubernetes.io/name" (include "refill.name" .)
    "app.kubernetes.io/instance" .Release.Name
    "app.kubernetes.io/version" .Chart.AppVersion
    "app.kubernetes.io/managed-by" .Release.Service
    "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")
-}}
{{ merge $own (.Values.commonLabels | default dict) | toYaml }}
{{- end }}

{{/* (root, the object's own): the field with its name, or nothing. */}}
{{- define "refill.annotations" -}}
{{- with merge (deepCopy (index . 1 | default dict)) ((index . 0).Values.commonAnnotations | default dict) -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{/* global.imageRegistry takes the place of a host that the repository begins with. */}}
{{- define "refill.image" -}}
{{- $repository := .Values.image.repository -}}
{{- with .Values.global.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "") -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Those of `global` may be names alone, as some charts have them. */}}
{{- define "refill.imagePullSecrets" -}}
{{- $secrets := list -}}
{{- range concat (.Values.imagePullSecrets | default list) (.Values.global.imagePullSecrets | default list) -}}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- with $secrets | uniq -}}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{/* Of a training pod, wherever in the cluster it runs. */}}
{{- define "refill.url" -}}
{{ include "refill.scheme" .Values.tls.secret }}://{{ include "refill.fullname" . }}.{{ .Release.Namespace }}.svc:{{ int .Values.service.port }}
{{- end }}

{{/* (a Secret with a certificate, or nothing) */}}
{{- define "refill.scheme" -}}
{{ ternary "https" "http" (not (empty .)) }}
{{- end }}

{{/* Of each pod, under the name that the headless service gives it, without a port. `{ordinal}` is refill's to fill in. */}}
{{- define "refill.podHost" -}}
{{ include "refill.fullname" . }}-{ordinal}.{{ include "refill.peersName" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{/* Of clients. */}}
{{- define "refill.podUrl" -}}
{{ include "refill.scheme" .Values.tls.secret }}://{{ include "refill.podHost" . }}:{{ int .Values.ports.clients }}
{{- end }}
